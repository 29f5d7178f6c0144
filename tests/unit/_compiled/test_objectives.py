"""Several objectives per sample, of compiled models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._capture.autograd.passes import Pass
from autogram._capture.uses import Use
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import INNER, compiled
from tests.unit.checks import assert_close_to_reference, trainable


def test_pytorch_refuses_batched_passes() -> None:
    """Why each objective of a sample takes a pass of its own."""
    model = nn.Linear(3, 4)
    y = torch.compile(model, backend="aot_eager")(torch.randn(5, 3))

    def vjp(cotangent: Tensor) -> Tensor:
        return torch.autograd.grad(y, model.weight, cotangent, retain_graph=True)[0]

    with pytest.raises(RuntimeError, match="compiled backward function within vmap"):
        torch.vmap(vjp)(torch.randn(2, 5, 4))


@pytest.mark.parametrize("inner", INNER)
def test_changing_objectives(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass for each objective of a sample; what is contracted inside is so for one alone."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6))
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model, inner)
    parameters = trainable(model)
    shown: list[str] = []
    passes: list[Pass] = []
    show, differentiate = Pass.show, Pass.differentiate

    def noted(self: Pass, call: Any, *rest: Any) -> None:
        if isinstance(call.args[0], Use):
            shown.append(call.args[0].function)
        show(self, call, *rest)

    def counted(self: Pass, *args: Any, **kwargs: Any) -> Any:
        passes.append(self)
        return differentiate(self, *args, **kwargs)

    monkeypatch.setattr(Pass, "show", noted)
    monkeypatch.setattr(Pass, "differentiate", counted)
    met: set[int] = set()
    for count in (1, 2, 2, 1, 3, 1, 2, 3):
        x = torch.randn(5, 3)
        with engine.paused():
            plain = model(x).square().unflatten(1, (count, -1)).sum(2)
        jacobian = reference_jacobian(plain.flatten(), parameters)
        losses = run(x).square().unflatten(1, (count, -1)).sum(2)
        weights = torch.linspace(0.5, 2.0, losses.numel()).to(losses)
        model.zero_grad()
        shown.clear()
        passes.clear()

        def weigh(gramian: Tensor, jacobian: Tensor = jacobian, w: Tensor = weights) -> Tensor:
            assert_close_to_reference(gramian, jacobian @ jacobian.T)
            return w

        engine.backward(losses, weigh)
        found = torch.cat([p.grad.flatten() for p in parameters])
        assert_close_to_reference(found, jacobian.T @ weights)
        if count in met:
            assert (len(passes), bool(shown)) == (count, count > 1)
        met.add(count)
