"""Samples that move, where rounding differs from pass to pass as behind attention on a GPU.

What is zero but for rounding, as the cotangent of the first query of a causal attention, is zero in
some passes only.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, batch, per_sample


class Model(nn.Module):
    """Samples are in other places for a while if index values say so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        x = self.first(x).tanh()
        if places is None:
            return self.last(self.second(x).tanh())
        x = self.second(x[places]).tanh()
        return self.last(x[places.argsort()])


@pytest.mark.parametrize("each", [1, 2])
def test_samples_that_stay(each: int) -> None:
    model = Model()
    engine = Engine(model, verify="always")
    for _ in range(6):
        output = model(batch(5, 3))
        assert_exact(engine, per_sample(output) if each == 1 else output, model)


def test_samples_that_move() -> None:
    """Other index values are noticed as ever, and so are other numbers of samples."""
    model = Model()
    engine = Engine(model, verify="always")
    for size in (5, 5, 5, 6, 6, 5, 5):
        assert_exact(engine, per_sample(model(batch(size, 3), torch.randperm(size))), model)


def test_samples_that_move_in_each_step() -> None:
    """With other sizes, too."""
    model = Model()
    engine = Engine(model)
    for call in range(20):
        size = 5 + call % 3
        assert_exact(engine, per_sample(model(batch(size, 3), torch.randperm(size))), model)


def test_a_graph_that_is_freed() -> None:
    """Index values are remembered with the layouts, and are read from the graph."""
    model = Model()
    engine = Engine(model, verify="never")
    for size in (5, 6, 7, 5):
        losses = per_sample(model(batch(size, 3), torch.arange(size)))
        jacobian = reference_jacobian(losses, model.parameters())
        _, gramian = engine.backward(losses, torch.diag, return_gramian=True)
        assert_close_to_reference(gramian, jacobian @ jacobian.T)


def test_samples_in_other_dimensions() -> None:
    """In some steps."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    engine = Engine(model, verify="always", batch_dim=0)
    for call in range(8):
        x = batch(4, 4, 4)
        y = model(x) if call % 3 else model(x.transpose(0, 1)).transpose(0, 1)
        assert_exact(engine, y.square().sum((1, 2)), model)


def test_a_use_without_a_cotangent_at_first() -> None:
    """Only later passes show it."""
    model = nn.ModuleDict({"always": nn.Linear(3, 4), "late": nn.Linear(3, 4)})
    engine = Engine(model, verify="always")
    for call in range(8):
        x = batch(4, 3)
        y = model["always"](x).tanh() + float(call > 2) * model["late"](x).sin()
        assert_exact(engine, per_sample(y), model)


class _Flickers(torch.autograd.Function):
    """Multiplies by 1, and leaves of some cotangents one that differs from pass to pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, every: int) -> Tensor:
        ctx.every = every
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        first = grad[:: ctx.every]
        grad[:: ctx.every] = 1e-14 * first * torch.randint(2, first.shape[:1]).view(-1, 1)
        return grad, None


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("fold", [True, False])
def test_rounding_in_place_of_zero(each: int, fold: bool) -> None:
    """The samples are where the other positions show them, and no call is coupled or refused."""
    model = nn.ModuleDict({"first": nn.Linear(3, 4), "last": nn.Linear(4, 2)})
    engine = Engine(model, batch_dim=0)
    for call in range(20):
        samples, positions = 5 + call % 2, 6
        x = batch(samples * positions, 3)
        h = model["first"](x if fold else x.view(samples, positions, 3)).view(-1, 4)
        h = model["last"](_Flickers.apply(h, positions).tanh()).view(samples, positions, 2)
        losses = h.square().sum((1, 2)) if each == 1 else h.square().sum(1)
        jacobian = reference_jacobian(losses, model.parameters())
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
