"""Outputs of compiled parts that share their memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from tests.unit._compiled.compiling import INNER, assert_step, assert_steps, compiled
from tests.unit.checks import trainable

OUTPUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "a view and its base": lambda y: (y.view(-1, 2, 3), y),
    "a base and its view": lambda y: (y, y.view(-1, 2, 3)),
    "two views": lambda y: (y.view(-1, 2, 3), y.view(-1, 3, 2)),
    "slices": lambda y: (y[:, :2], y[:, 2:], y),
    "chunks": lambda y: y.chunk(2, 1),
    "chunks and their base": lambda y: (*y.chunk(2, 1), y),
    "twice the same": lambda y: (y, y),
}


class _Several(nn.Module):
    """A layer of which several results are given."""

    def __init__(self, outputs: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layer, self.outputs = nn.Linear(3, 6), outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.outputs(self.layer(x))


def _losses(outputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    losses = [i * y.square().flatten(1).sum(1) for i, y in enumerate(outputs, 1)]
    return torch.stack(losses).sum(0)


@pytest.mark.parametrize("name", OUTPUTS)
def test_views(name: str) -> None:
    model = _Several(OUTPUTS[name])
    engine = Engine(model, unseen="error")
    batches = [(torch.randn(n, 3),) for n in (4, 4, 5)]
    assert_steps(model, compiled(model), engine, batches, _losses)


@pytest.mark.parametrize("inner", INNER)
def test_without_an_engine(inner: str) -> None:
    """Gradients are those of the model that is not compiled."""
    model = _Several(OUTPUTS["a view and its base"])
    x = torch.randn(4, 3)
    expected, found = (
        torch.autograd.grad(_losses(run(x), x).sum(), model.layer.weight)
        for run in (model, compiled(model, inner))
    )
    assert torch.allclose(found[0], expected[0])


class _Hidden(nn.Module):
    """A call without a rule, and a layer whose results PyTorch computes as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.slope = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.atan2(self.first(x), self.slope))
        return found


@pytest.mark.parametrize("inner", INNER)
def test_views_within_a_part(inner: str) -> None:
    """What a result is a view of has no graph: the result itself leads to the rows."""
    model = _Hidden()
    engines = [Engine(model, verify="never") for _ in range(2)]
    run = compiled(model, inner)
    for samples in (4, 4, 5):
        x = torch.randn(samples, 2, 3)
        for engine in engines:
            with engines[0].paused(), engines[1].paused():
                expected = model(x).square().sum((1, 2))
            assert_step(engine, run(x).square().sum((1, 2)), expected, trainable(model))


class _Around(nn.Module):
    """A part that may be compiled alone, and what is done with its outputs."""

    def __init__(self, part: Callable[["_Around", Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 6), nn.Parameter(torch.rand(6) + 0.5)
        self.part = part
        self.is_compiled = False

    def forward(self, x: Tensor) -> Tensor:
        part = compiled(self.part) if self.is_compiled else self.part
        y = self.layer(x) + 0
        view = y.view(-1, 3, 2)
        first, *others = part(self, y)
        first.mul_(3)
        sums = [z.flatten(1).sin().sum(1).expand(len(x)) for z in (first, view, *others)]
        return torch.stack(sums).prod(0)


def _with_view(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y.view(-1, 3, 2)


def _hidden(model: _Around, y: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.atan2(y, model.scale)
    return z.view(-1, 2, 3), z.view(-1, 3, 2)


def _derived(model: _Around, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *_with_view((model.scale * 2).view(1, 6)), y * 2


def _changed_argument(model: _Around, y: Tensor) -> tuple[Tensor, Tensor]:
    y[:, :3].atan2_(model.scale[:3])
    return y * 2, y.view(-1, 2, 3)


PARTS: dict[str, Callable[[_Around, Tensor], tuple[Tensor, ...]]] = {
    "by a rule": lambda model, y: _with_view(y * model.scale),
    "by rows": lambda model, y: _with_view(torch.atan2(y, model.scale)),
    "views of a hidden tensor": _hidden,
    "of parameters alone": _derived,
    "a changed argument": _changed_argument,
}


@pytest.mark.parametrize("count", [1, 2], ids=["one engine", "two engines"])
@pytest.mark.parametrize("name", PARTS)
def test_outputs_are_changed(name: str, count: int) -> None:
    """Each tensor that shares memory with what is changed in place has the new values."""
    model = _Around(PARTS[name])
    twin = copy.deepcopy(model)
    engines = [Engine(model, verify="never") for _ in range(count)]
    model.is_compiled = True
    for size in (4, 4, 5):
        x = torch.randn(size, 3)
        for engine in engines:
            assert_step(engine, model(x), twin(x), trainable(model), trainable(twin))
