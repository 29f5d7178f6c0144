"""Nodes that nobody can read are tried in each call: right where they move samples, and cheap."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import irregular
from tests.unit.engines import assert_exact, assert_exact_in_one_pass, counted_passes
from tests.unit.series import CALLS, MAY_BE_COUPLED, assert_series_is_exact

pytestmark = MAY_BE_COUPLED

# Of the samples of a batch; nothing in the graph tells them from one another.
ORDER, SWAPPED, TWICE = [0, 1, 2, 3], [1, 0, 2, 3], [0, 0, 2, 3]


class Taken(torch.autograd.Function):
    """Rows in an order, which is a list in the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: list[int]) -> Tensor:
        ctx.order, ctx.shape = order, x.shape
        return x[order]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        zeros = cotangent.new_zeros(ctx.shape)
        return zeros.index_add(0, torch.tensor(ctx.order, device=zeros.device), cotangent), None


class Product(torch.autograd.Function):
    """x * y, without a gradient for y unless it is wanted, and then for y in an order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, order: list[int] | None) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(x, y)
        return x * (y.detach() if order is None else y[order])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        if ctx.order is None:
            return cotangent * y, None, None
        order = torch.tensor(ctx.order, device=y.device)
        moved = torch.zeros_like(y).index_add(0, order, cotangent * x)
        return cotangent * y[order], moved, None


def changed(x: Tensor, is_transposed: bool) -> Tensor:
    """A copy of which a view is changed in place; no node tells which view."""
    y = x.sin()
    (y.transpose(0, 1) if is_transposed else y)[:, :2] = x[:, :2].cos()
    return y


def folded(x: Tensor, is_moved: bool) -> Tensor:
    """All rows of all samples in their order, or the first and the last one exchanged."""
    rows = x.reshape(-1, 4)
    first, *others, last = range(len(rows))
    order = [last, *others, first] if is_moved else [first, *others, last]
    return Taken.apply(rows, order).view(x.shape)


OPERATORS: dict[str, tuple[Callable[[Tensor, Any], Tensor], list[Any]]] = {
    "Function": (Taken.apply, [ORDER, SWAPPED]),
    "folded": (folded, [False, True]),
    "folded behind": (lambda x, a: folded(x.transpose(0, -2), a).transpose(0, -2), [False, True]),
    "twice the same": (Taken.apply, [ORDER, TWICE]),
    "a new gradient": (lambda x, a: Product.apply(x, x.tanh(), a), [None, SWAPPED, ORDER]),
}


class Model(nn.Module):
    """An operator between two layers, with or without tokens."""

    def __init__(self, operator: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.operator = operator
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, argument: Any) -> Tensor:
        return self.last(self.operator(self.first(x).tanh(), argument)).tanh()


@CALLS
@pytest.mark.parametrize("shape", [(4, 3), (4, 5, 3)])
@pytest.mark.parametrize("name", OPERATORS)
def test_nodes_that_move_samples_at_times(name: str, shape: tuple[int, ...], fused: bool) -> None:
    """Whatever they did in the steps before."""
    operator, arguments = OPERATORS[name]
    model, x = Model(operator), irregular(*shape)
    assert_series_is_exact(
        lambda a: model(x, a).square().flatten(1).sum(1), [model], arguments, fused=fused
    )


@CALLS
def test_views_that_are_changed_in_place(fused: bool) -> None:
    """Of as many tokens as there are samples, so that either may be put in the place of others."""
    model, x = Model(changed), irregular(4, 4, 3)
    assert_series_is_exact(
        lambda a: model(x, a).square().sum((1, 2)), [model], [False, True], fused=fused
    )


def columns(x: Tensor, _: Any) -> Tensor:
    """Some columns changed in place, and a Function that leaves the samples where they are."""
    y = x.sin()
    y[:, 1:3] = x[:, :2].cos()
    return Taken.apply(y, range(len(y)))


@pytest.mark.parametrize("samples", [4, 40])
def test_nodes_that_move_nothing_cost_no_pass(samples: int) -> None:
    """New values and masks do not matter, nor do new numbers of tokens."""
    torch.manual_seed(0)
    model = Model(columns)
    engine = Engine(model, verify="never")
    for tokens in (5, 5, 5, 7, 7, 5):
        x = torch.randn(samples, tokens, 3) * (torch.rand(samples, tokens, 1) < 0.6)
        mask = (torch.rand(samples, tokens, 1) < 0.6).double()
        losses = (model(x, None).square() * mask).flatten(1).sum(1)
        assert_exact_in_one_pass(engine, losses, model)


def test_folded_samples_cost_no_pass() -> None:
    """At other sizes, they may be folded otherwise."""
    model = Model(folded)
    engine = Engine(model, verify="never")
    for tokens in (5, 5, 7, 7, 7, 5):
        assert_exact_in_one_pass(
            engine, model(irregular(4, tokens, 3), False).sin().sum((1, 2)), model
        )


def test_samples_that_one_exponent_does_not_tell_apart() -> None:
    """Two samples at a distance of 32 change places."""
    order, other = [*range(40)], [32, *range(1, 32), 0, *range(33, 40)]
    model, x = Model(Taken.apply), irregular(40, 3)
    assert_series_is_exact(lambda a: model(x, a).square().sum(1), [model], [order, other])


def test_nodes_that_move_samples_cost_no_pass() -> None:
    """They are carried out alone in each call."""
    model, x = Model(Taken.apply), irregular(4, 3)
    engine = Engine(model, verify="never")
    for order in (ORDER, ORDER, SWAPPED, ORDER, ORDER):
        assert_exact_in_one_pass(engine, model(x, order).square().sum(1), model)


def test_several_objectives_of_each_sample() -> None:
    """A batched pass cannot try a node."""
    model, x = Model(Taken.apply), irregular(4, 3)
    assert_series_is_exact(lambda a: model(x, a).sin(), [model], [ORDER, SWAPPED])


def test_saved_tensors_that_are_packed() -> None:
    """Reading them may compute a part of the model again, so that such a node is not tried."""
    model, x = Model(lambda y, a: Product.apply(y, y.tanh(), a)), irregular(4, 3)
    engine = Engine(model, verify="never")
    for is_packed in (False, False, True, True, False):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.clone() if is_packed else t,  # noqa: B023
            lambda t: t,
        ):
            losses = model(x, ORDER).square().sum(1)
        assert_exact(engine, losses, model)


def test_slices_that_are_changed_in_place_in_a_checkpoint() -> None:
    """What a node saved there can be read once, and a changed slice does not show what it saved."""
    model, x = Model(lambda y, a: checkpoint(scaled, y, a, use_reentrant=False)), irregular(4, 3)
    engine = Engine(model, verify="never")
    for factor in (1.0, 1.0, 2.0, 1.0):
        assert_exact(engine, model(x, factor).square().sum(1), model)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Some columns are multiplied in place."""
    y, z = x.sin(), x.cos() * factor
    y[:, 1:3] *= z[:, :2]
    return y


class Scattered(nn.Module):
    """Features of each sample in the place of its tokens, wherever a mask has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.features, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y, z = self.tokens(x).tanh(), self.features(x[:, :2].cos()).tanh()
        return self.last(y.masked_scatter(mask.unsqueeze(2), z)).tanh()


def mask_of(*places: tuple[int, ...]) -> Tensor:
    """Two places of each sample, or more of one sample and fewer of the next."""
    mask = torch.zeros(len(places), 5, dtype=torch.bool)
    for sample, some in enumerate(places):
        mask[sample, list(some)] = True
    return mask


MASKS = [
    mask_of((0, 4), (1, 2), (0, 1), (2, 4)),
    mask_of((0, 4), (0, 4), (0, 1), (2, 4)),
    mask_of((0, 1, 4), (2,), (0, 1), (2, 4)),
    mask_of((0, 1, 2, 4), (), (0, 1), (2, 4)),
]


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_constants_that_move_samples(first: int, fused: bool) -> None:
    """Masks after which features of one sample are in the place of another's tokens."""
    model, x = Scattered(), irregular(4, 5, 3)
    assert_series_is_exact(
        lambda mask: model(x, mask)[:, :-1].square().sum((1, 2)),
        [model],
        MASKS[first:] + MASKS[:first],
        fused=fused,
    )


@CALLS
@pytest.mark.parametrize("mask", MASKS)
def test_places_that_get_a_cotangent(mask: Tensor, fused: bool) -> None:
    """The last token has a loss in some steps; with equal masks, it may be of another sample."""
    model, x = Scattered(), irregular(4, 5, 3)

    def losses_of(weight: float) -> Tensor:
        weights = torch.tensor([1.0, 1.0, 1.0, 1.0, weight]).unsqueeze(1)
        return (model(x, mask).square() * weights).sum((1, 2))

    assert_series_is_exact(losses_of, [model], [0.0, 1.0], fused=fused)


def test_equal_masks_cost_no_pass() -> None:
    """Nor do others, whether they keep samples in place or not."""
    model = Scattered()
    engine = Engine(model, verify="never")
    for number in (0, 0, 0, 1, 1, 2, 2):
        weights = (torch.arange(5) < 4 - number % 2).double().unsqueeze(1)
        losses = (model(torch.randn(4, 5, 3), MASKS[number]).square() * weights).sum((1, 2))
        assert_exact_in_one_pass(engine, losses, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("samples", [4, 40])
def test_numbers_of_half_the_width(dtype: torch.dtype, samples: int) -> None:
    """Of which the largest powers of two are infinite in float16."""
    model = Model(Taken.apply).to(dtype)
    model.operator = Taken.apply
    engine = Engine(model, verify="never")
    order = list(range(samples))
    swapped = [1, 0, *order[2:]]
    counts = []
    for now in (order, order, order, swapped, order, swapped):
        losses = model(irregular(samples, 3).to(dtype), now).square().sum(1)
        with counted_passes(losses) as passes:
            gramian = engine.compute_gramian(losses).double()
        counts.append(len(passes))
        jacobian = reference_jacobian(losses, model.parameters()).double()
        expected = jacobian @ jacobian.T
        assert (gramian - expected).abs().max() < 0.05 * expected.abs().max()
    assert counts[1:3] == [1, 1]
