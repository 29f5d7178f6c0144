"""Gramians from inside of compiled backward passes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, VerificationError
from autogram._capture.backward.assembly import Assembly
from autogram._compiled import variants
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import (
    INNER,
    Decoder,
    Images,
    class_losses,
    compile_inside,
    compiled,
    language_losses,
    sequences,
)
from tests.unit._compiled.inside import (
    MODELS,
    assert_fused,
    assert_gramians,
    mlp,
    shown_uses,
    squares,
)
from tests.unit.checks import assert_close_to_reference, trainable


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", MODELS)
def test_steps(name: str, inner: str) -> None:
    make, batch_of, losses_of, shown = MODELS[name]
    model = make()
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model, inner)

    def losses() -> tuple[Tensor, Tensor]:
        batch = batch_of()
        with engine.paused():
            plain = losses_of(model(*batch), *batch)
        return losses_of(run(*batch), *batch), plain

    assert_gramians(engine, losses, trainable(model), shown)


@pytest.mark.parametrize("fused", [False, True])
def test_checks_see_what_is_contracted_inside(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """As in other steps. Other products with the Jacobian need factors."""
    model = mlp()
    engine = Engine(model, batch_dim=0)  # the calls 1, 2, 4, 8 and 16 are verified
    run = compiled(model)

    def step() -> list[str]:
        x = torch.randn(5, 3)
        losses = squares(run(x), x)
        with shown_uses() as shown:
            if fused:
                engine.backward(losses, lambda gramian: gramian.diagonal())
            else:
                engine.compute_gramian(losses)
        return shown

    shown = [step() for _ in range(14)]
    assert "linear" in shown[0]
    assert "linear" not in shown[7]
    assert engine.jacobian(squares(run(torch.ones(5, 3)), torch.ones(5, 3))).shape == (5, 26)
    take = Assembly.take_part

    def wrong(self: Assembly, gramian: Tensor, **others: Any) -> None:
        take(self, 2 * gramian, **others)

    monkeypatch.setattr(Assembly, "take_part", wrong)
    with pytest.raises(VerificationError):
        step()


def test_several_objectives_are_shown() -> None:
    model = mlp()
    engine = Engine(model, verify="never")
    run = compiled(model)

    def losses() -> tuple[Tensor, Tensor]:
        x = torch.randn(5, 3)
        with engine.paused():
            plain = model(x).square()
        return run(x).square(), plain

    for _ in range(3):
        own, plain = losses()
        jacobian = reference_jacobian(plain.flatten(), trainable(model))
        assert_close_to_reference(engine.compute_gramian(own), jacobian @ jacobian.T)


def test_used_in_several_parts() -> None:
    """A parameter of two calls has cross terms, which no part alone can have."""
    model = mlp()
    engine = Engine(model, verify="never")
    run = compiled(model)

    def losses() -> tuple[Tensor, Tensor]:
        x, z = torch.randn(5, 3), torch.randn(5, 3)
        with engine.paused():
            plain = squares(model(x) + model(z), x)
        return squares(run(x) + run(z), x), plain

    assert_gramians(engine, losses, trainable(model), ["linear"] * 4)


def test_layers_that_share_a_graph() -> None:
    """Each call of one graph has parameters of its own."""
    model = Decoder(layers=3)
    twin = copy.deepcopy(model)
    engine = Engine(model, unseen="error", verify="never")
    for block in model.blocks:
        compile_inside(block)

    def losses() -> tuple[Tensor, Tensor]:
        (ids,) = sequences(4, 6)
        own, plain = (language_losses(m(ids), ids) for m in (model, twin))
        return own, plain

    for _ in range(3):
        own, plain = losses()
        jacobian = reference_jacobian(plain, trainable(twin))
        with shown_uses() as shown:
            gramian = engine.compute_gramian(own)
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
    assert "linear" not in shown[2:]


def test_engines_of_different_parameters() -> None:
    """Of one use, one engine has the weight and the other one has both."""
    model = mlp()
    whole, part = Engine(model, verify="never"), Engine(model, verify="never")
    run = compiled(model)
    part.hooks.deactivate(module=model[0])
    for _ in range(3):
        x = torch.randn(5, 3)
        losses = squares(run(x), x)
        for engine, parameters in ((whole, model.parameters()), (part, model[2].parameters())):
            jacobian = reference_jacobian(losses, list(parameters))
            assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


class _Shifted(nn.Module):
    """A normalisation, whose weight and bias are of one shape and belong to other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.scale, self.shift = nn.LayerNorm(4, bias=False), nn.LayerNorm(4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found = F.layer_norm(self.first(x), (4,), self.scale.weight, self.shift.weight)
        return found.exp().sum(1)


def test_engines_of_parameters_of_one_shape() -> None:
    """Of one use, one engine has the weight, and the other one the bias."""
    model = _Shifted()
    run = compiled(model)
    engines = [
        (Engine(module, verify="never"), list(module.parameters()))
        for module in (model.scale, model.shift)
    ]
    for _ in range(3):
        for engine, parameters in engines:
            losses = run(torch.randn(5, 3))
            jacobian = reference_jacobian(losses, parameters)
            assert_fused(engine, losses, jacobian, parameters)


def test_small_limit() -> None:
    """The contractions in the graph keep the limit of the engine."""
    model = Images()
    engine = Engine(model, unseen="error", verify="never", memory_limit_bytes=2**10)
    run = compiled(model)

    def losses() -> tuple[Tensor, Tensor]:
        x = torch.randn(6, 3, 8, 8)
        with engine.paused():
            plain = class_losses(model(x), x)
        return class_losses(run(x), x), plain

    assert_gramians(engine, losses, trainable(model), [])


def test_what_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine contracts it, as ever."""

    def fail(*args: object) -> None:
        raise RuntimeError(f"no {len(args)}")

    monkeypatch.setattr(variants, "append_contractions", fail)
    model = mlp()
    engine = Engine(model, verify="never")
    run = compiled(model)

    def losses() -> tuple[Tensor, Tensor]:
        x = torch.randn(5, 3)
        with engine.paused():
            plain = squares(model(x), x)
        return squares(run(x), x), plain

    assert_gramians(engine, losses, trainable(model), ["linear"] * 2)


def test_a_fused_step_makes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the engine's parameters wants a gradient."""
    model = mlp()
    engine = Engine(model, verify="never")
    run = compiled(model)
    passes: list[int] = []
    call = variants.Backward.__call__

    def counted(self: variants.Backward, args: list[Any]) -> Any:
        passes.append(1)
        return call(self, args)

    monkeypatch.setattr(variants.Backward, "__call__", counted)
    for step in range(3):
        x = torch.randn(5, 3)
        losses = squares(run(x), x)
        passes.clear()
        engine.backward(losses, lambda gramian: torch.ones(len(gramian)))
        assert step == 0 or len(passes) == 1
