"""Columns that are put together as uses arrive, and leave when they are complete."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._capture.backward.assembly import Assembly
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, batch, mlp, per_sample


class Mixed(nn.Module):
    """Uses of several sizes, of which one has no rule, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(3, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.rand(2) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(self.first(x).tanh())
        return torch.hypot(self.last(self.shared(y).tanh()), self.scale)


@pytest.mark.parametrize("make_model", [mlp, Mixed])
@pytest.mark.parametrize("batch_dim", [0, None])
def test_gramians_and_steps_are_exact(
    make_model: Callable[[], nn.Module], batch_dim: int | None
) -> None:
    model = make_model()
    engine = Engine(model, batch_dim=batch_dim)
    for _ in range(3):
        assert_exact(engine, per_sample(model(batch(4, 3))), model)
    losses = per_sample(model(batch(4, 3)))
    weights = torch.tensor([1.0, 0.0, -2.0, 3.0])
    expected = torch.autograd.grad(losses, [*model.parameters()], weights, retain_graph=True)
    engine.backward(losses, lambda gramian: weights)  # noqa: ARG005
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert_close_to_reference(parameter.grad, gradient)


@pytest.mark.parametrize("keeps", [False, True], ids=["alone", "beside losses of earlier steps"])
def test_factors_are_dropped_on_the_way(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A use that only other losses depend on is not waited for."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(8)))
    engine = Engine(model, verify="never")
    kept, waiting = [], []
    add = Assembly._add

    def counted(self: Assembly, *args: Any) -> None:  # type: ignore[type-arg]
        add(self, *args)
        accounts = set(self._accounts.values())
        waiting.append(sum(x.columns is not None and x.columns.dtype is not None for x in accounts))

    monkeypatch.setattr(Assembly, "_add", counted)
    for _ in range(3):
        losses = per_sample(model(batch(4, 5)))
        kept += [losses] if keeps else []
        engine.compute_gramian(losses)
    assert max(waiting) == 2  # the weight and the bias of one layer
