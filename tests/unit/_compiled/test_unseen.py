"""Parameters in compiled parts where tracing shows no call that reads them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import (
    assert_step,
    assert_steps,
    compile_inside,
    compiled,
    counted_parts,
)
from tests.unit.checks import trainable

pytestmark = pytest.mark.slow


class _Product(torch.autograd.Function):
    """A product, in a custom autograd Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g * y, (g * x).sum(0)


class _Unseen(nn.Module):
    """Layers with something between them that Dynamo keeps as one call."""

    def __init__(self, between: Callable[["_Unseen", Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self, self.first(x).tanh()))
        return found


def _function(model: _Unseen, x: Tensor) -> Tensor:
    y: Tensor = _Product.apply(x, model.scale)  # type: ignore[no-untyped-call]  # as typed in torch
    return model.inner(y).sin()


def _function_of_derived(model: _Unseen, x: Tensor) -> Tensor:
    y: Tensor = _Product.apply(x, model.scale.exp())  # type: ignore[no-untyped-call]  # as typed in torch
    return model.inner(y).sin()


def _vmap(model: _Unseen, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: model.inner(row).sin() * model.scale)(x)


def _grad(model: _Unseen, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: (model.inner(y).tanh() * model.scale).sum())(x)


def _jvp(model: _Unseen, x: Tensor) -> Tensor:
    value, tangent = torch.func.jvp(lambda y: model.inner(y).tanh(), (x,), (x.sin(),))
    found: Tensor = value + tangent
    return found * model.scale


BETWEEN = [_function, _function_of_derived, _vmap, _grad, _jvp]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_rows(between: Callable[[_Unseen, Tensor], Tensor]) -> None:
    """They get explicit rows, as without a compiler."""
    model = _Unseen(between)
    engine = Engine(model, verify="never")
    batches = [(torch.randn(n, 3),) for n in (4, 4, 5)]
    assert_steps(model, compiled(model), engine, batches, lambda y, _: y.square().sum(1))


def test_first_of_all() -> None:
    """What they compute from samples alone, before any other use, depends on the samples."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.last = nn.Parameter(torch.randn(3)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = _Product.apply(x, self.scale)  # type: ignore[no-untyped-call]  # as typed in torch
            found: Tensor = self.last(y.sin())
            return found

    model = First()
    engine = Engine(model, verify="never")
    batches = [(torch.randn(n, 3),) for n in (4, 4, 5)]
    assert_steps(model, compiled(model), engine, batches, lambda y, _: y.square().sum(1))


class _Given(nn.Module):
    """Layers with a tensor that is given, and that may be changed in place."""

    def __init__(self, *, is_changed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.is_changed = is_changed

    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        if self.is_changed:
            given.mul_(2)
        return F.linear(self.first(x).tanh(), self.last.weight, given) + self.last.bias


GIVEN: dict[str, Callable[[_Given], Tensor]] = {
    "a part": lambda model: model.first.bias[:2],
    "a product": lambda model: model.first.bias[1:3] * 2,
    "of a product": lambda model: (model.first.weight[0] * 2).sin()[:2] + model.last.bias,
}


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_arguments_that_are_computed_from_what_is_read(name: str, is_changed: bool) -> None:
    """Nothing tells the compiler, outside of a module, that the argument is of no sample.

    Its parameters get rows of what the part reads itself, and of the argument, each once.
    """
    model = _Given(is_changed=is_changed)
    engine = Engine(model, verify="never")
    run = compiled(model)
    for size in (4, 4, 5):
        x = torch.randn(size, 3)
        with engine.paused():
            expected = model(GIVEN[name](model).clone(), x).square().sum(1)
        losses = run(GIVEN[name](model).clone(), x).square().sum(1)
        assert_step(engine, losses, expected, trainable(model))


class _Outer(nn.Module):
    """A part that is given twice what it reads itself in a custom autograd Function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Scaled()

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.inner.scale * 2
        found: Tensor = self.inner(x, doubled, doubled.sin())
        return found


class _Scaled(nn.Module):
    """Products in custom autograd Functions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.randn(3)), nn.Linear(3, 2)

    def forward(self, x: Tensor, *scales: Tensor) -> Tensor:
        for scale in (self.scale, *scales):
            x = _Product.apply(x, scale)  # type: ignore[no-untyped-call]  # as typed in torch
        found: Tensor = self.last(x.sin())
        return found


def test_derived_arguments() -> None:
    """Of one parameter, one computed from the other, and all without a rule."""
    model = _Outer()
    engine = Engine(model, verify="never")
    batches = [(torch.randn(n, 3),) for n in (4, 4, 5)]
    twin = copy.deepcopy(model)
    compile_inside(model.inner)
    for (x,) in batches:
        expected = twin(x).square().sum(1)
        assert_step(engine, model(x).square().sum(1), expected, trainable(model), trainable(twin))


class _Bags(nn.Module):
    """Bags of words, one behind the other: the rule has to know how long the longest is."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.last = nn.EmbeddingBag(7, 4, mode="sum"), nn.Linear(4, 2)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = self.last(self.bags(words, offsets).tanh())
        return found


@pytest.mark.parametrize("fullgraph", [False, True])
def test_rules_that_read_values(fullgraph: bool) -> None:
    """A tracing has no values: such a call gets rows, and stays in the graph."""
    model = _Bags()
    engine = Engine(model, verify="never")
    batches = [(torch.randint(7, (3 * n,)), torch.arange(0, 3 * n, 3)) for n in (4, 4, 5)]
    with counted_parts() as parts:
        run = compiled(model, fullgraph=fullgraph)
        assert_steps(model, run, engine, batches, lambda y, *_: y.square().sum(1))
    assert all(part._part.rows for part in parts)


class _Hyper(nn.Module):
    """Makes weights from parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.head = nn.Linear(1, 4), nn.Linear(4, 6)

    def forward(self) -> Tensor:
        found: Tensor = self.head(self.code.weight.T.tanh()).view(2, 3)
        return found


def test_a_compiled_function_that_reads_parameters_alone() -> None:
    """J has the parameters and the hooks of its call, not those of later."""
    model = _Hyper().double()
    engine = Engine(model, verify="never")
    run = compiled(lambda: model())

    def assert_exact(weight: Tensor, parameters: list[Tensor], change: Callable[[], None]) -> None:
        losses = F.linear(torch.randn(4, 3).double(), weight).tanh().square().sum(1)
        change()
        jacobian = reference_jacobian(losses, parameters)
        torch.testing.assert_close(engine.compute_gramian(losses), jacobian @ jacobian.T)

    def replace() -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    for _ in range(2):
        with engine.hooks.inactive(module=model.head):
            weight = run()
        assert_exact(weight, [model.code.weight], lambda: None)
        assert_exact(run(), [model.code.weight, *model.head.parameters()], replace)
