"""Tensors that are changed in place, of which compiled parts compute what parameters stand for."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import ChangedTensorError, Engine
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import assert_step, assert_steps, compiled
from tests.unit.checks import assert_close_to_reference, trainable


class _Counting(nn.Module):
    """A layer whose weight depends on a buffer."""

    def __init__(self, body: Callable[["_Counting", Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.last, self.body = nn.Linear(3, 3), nn.Linear(3, 2), body
        self.register_buffer("steps", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.body(self, x).tanh())
        return found.square().sum(1)


def _before(model: _Counting, x: Tensor) -> Tensor:
    model.steps += 1
    return F.linear(x, model.layer.weight * model.steps)


def _behind(model: _Counting, x: Tensor) -> Tensor:
    x = F.linear(x, model.layer.weight + model.steps)
    model.steps += 1
    return x


def _between(model: _Counting, x: Tensor) -> Tensor:
    x = F.linear(x, model.layer.weight + model.steps)
    model.steps.add_(1)
    return F.linear(x, model.layer.weight + model.steps)


@pytest.mark.parametrize("body", [_before, _behind, _between], ids=lambda body: body.__name__)
def test_inside(body: Callable[[_Counting, Tensor], Tensor]) -> None:
    """The parameter gets rows: nothing of what it is used for is computed again."""
    model = _Counting(body)
    twin = copy.deepcopy(model)
    engine = Engine(model, verify="never")
    run = compiled(model)
    for size in (4, 4, 5):
        x = torch.randn(size, 3)
        assert_step(engine, run(x), twin(x), trainable(model), trainable(twin))


class _Normalised(nn.Module):
    """A layer whose weight depends on the statistics of the batch normalisation behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.layer.weight + self.norm.running_mean[:, None])
        found: Tensor = self.norm(x).tanh()
        return found.square().sum(1)


def test_running_statistics() -> None:
    """They are changed below autograd, which counts no version."""
    model = _Normalised()
    twin = copy.deepcopy(model)
    engine = Engine(model, batch_dim=None, verify="never")
    run = compiled(model)
    for size in (4, 4, 5):
        x = torch.randn(size, 3)
        losses, expected = run(x), twin(x)
        jacobian = reference_jacobian(expected, trainable(twin))
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


@pytest.mark.parametrize("is_derived", [True, False], ids=["of a parameter", "a buffer"])
def test_outside(is_derived: bool) -> None:
    """What is computed again for rows would be of the new values."""
    part = compiled(lambda x, w, s: F.linear(x, w * 2 + s))

    def body(model: _Counting, x: Tensor) -> Tensor:
        w = model.layer.weight * 2
        y: Tensor = part(x, w, model.steps)
        (w if is_derived else model.steps).add_(1)
        return y

    model = _Counting(body)
    engine = Engine(model, verify="never")
    for _ in range(2):
        losses = model(torch.randn(4, 3))
        with pytest.raises(ChangedTensorError, match="was changed in place after"):
            engine.compute_gramian(losses)


def test_made_in_inference_mode() -> None:
    """Autograd does not save such a tensor; it is kept otherwise."""
    model = _Counting(lambda model, x: F.linear(x, model.layer.weight + model.steps))
    with torch.inference_mode():
        model.steps = torch.ones(1)
    engine = Engine(model, unseen="error")
    batches = [(torch.randn(n, 3),) for n in (4, 4, 5)]
    assert_steps(model, compiled(model), engine, batches, lambda losses, _: losses)


def _before_the_change(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    found = w * 3
    w.add_(x.mean(0))
    return found, x + w


def test_output_from_before_a_change() -> None:
    """An output of parameters alone has the values from before samples were added to them."""
    model = _Counting(lambda model, x: torch.mul(*model.part(x, model.layer.bias * 2)))
    model.part = _before_the_change
    twin = copy.deepcopy(model)
    model.part = compiled(_before_the_change)
    engine = Engine(model, verify="never", batch_dim=None)
    for size in (4, 4, 5):
        x = torch.randn(size, 3)
        assert_step(engine, model(x), twin(x), trainable(model), trainable(twin))


class _Product(torch.autograd.Function):
    """A product that no rule knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return g * scale, (g * x).sum(0)


class _Overlapping(nn.Module):
    """A layer behind a part that is given a tensor and a slice of it, and changes the tensor."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.randn(2))
        self.part, self.multiply = self.body, multiply

    def body(self, part: Tensor, whole: Tensor) -> Tensor:
        scale = self.scale.exp()
        y = self.multiply(part + 1, scale)
        whole.mul_(2).add_(1)
        return y + part

    def forward(self, x: Tensor) -> Tensor:
        whole = self.first(x).tanh() + 1
        y = self.part(whole[:, :2], whole)
        found: Tensor = y.square().sum(1) + self.last(whole).square().sum(1)
        return found


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
@pytest.mark.parametrize("multiply", [torch.mul, _Product.apply], ids=["rule", "rows"])
def test_arguments_that_share_memory(multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    """AOTAutograd puts them together to one input, which comes before all others."""
    model = _Overlapping(multiply)
    twin = copy.deepcopy(model)
    engine = Engine(model, verify="never")
    model.part = compiled(model.body)
    for size in (4, 4, 5):
        x = torch.randn(size, 3)
        assert_step(engine, model(x), twin(x), trainable(model), trainable(twin))
