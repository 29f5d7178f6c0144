"""Parameters in compiled parts where tracing shows no call that reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from tests.unit._compiled.compiling import assert_steps, compiled


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
