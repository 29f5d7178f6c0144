"""Samples that stay or move from step to step, and what it costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, MixedSamplesError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, assert_exact_in_one_pass, batch, per_sample

ORDERS = ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 2, 0])


class Rows(nn.Module):
    """Rows of a linear layer's output, taken by a function of it and of an index."""

    def __init__(self, take: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.take = take

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        rows = self.layer(x)
        return rows if self.take is None else self.take(rows, order)


TAKES = {
    "embedding": lambda x, order: F.embedding(order, x),
    "torch.embedding": lambda x, order: torch.embedding(x, order),
    "embedding_bag": lambda x, order: F.embedding_bag(order.unsqueeze(1), x, mode="sum"),
    "[]": lambda x, order: x[order],
}


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "behind"])
@pytest.mark.parametrize("name", TAKES)
def test_rows_in_an_order_that_changes(name: str, is_inside: bool) -> None:
    """Activations used as a table, the first times in their own order."""
    take = TAKES[name]
    model = Rows(take if is_inside else None)
    engine = Engine(model)
    for order in map(torch.tensor, ORDERS):
        rows = model(batch(4, 3), order)
        assert_exact(engine, per_sample(rows if is_inside else take(rows, order)), model)


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(lambda w, tokens: F.embedding(tokens, w), id="embedding"),
        pytest.param(lambda w, tokens: F.embedding(tokens, w * 2), id="derived table"),
        pytest.param(lambda w, tokens: F.embedding(tokens, w.detach()) * w[0], id="frozen table"),
        pytest.param(lambda w, tokens: w[tokens], id="[]"),
        pytest.param(lambda w, tokens: F.embedding_bag(tokens, w).unsqueeze(1), id="bag"),
    ],
)
def test_new_tokens_move_no_samples(
    table: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Tokens of a table of parameters."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(batch(7, 4))

        def forward(self, tokens: Tensor) -> Tensor:
            return table(self.weight, tokens)

    model = Tokens()
    engine = Engine(model, verify="never")
    for _ in range(4):
        assert_exact_in_one_pass(engine, per_sample(model(torch.randint(0, 7, (4, 3)))), model)


class Chunks(nn.Module):
    """Windows of four tokens that overlap, by strides, of whatever strides the tokens have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(batch(4))

    def forward(self, x: Tensor, strides: tuple[int, ...]) -> Tensor:
        y = self.first(x).tanh() if len(strides) == 4 else x * self.scale
        size = (len(x), 3, 4, 4) if len(strides) == 4 else (len(x), 4, 4)
        return self.last(y.as_strided(size, strides)).tanh()


@pytest.mark.parametrize("seed", range(2))
def test_overlapping_chunks_move_no_samples(seed: int) -> None:
    """Whatever the values are."""
    model = Chunks()
    engine = Engine(model, verify="never")
    torch.manual_seed(seed)
    for _ in range(4):
        x = torch.randn(5, 8, 3) * (torch.rand(5, 8, 1) < 0.5)
        assert_exact_in_one_pass(engine, per_sample(model(x, (32, 8, 4, 1))), model)


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("is_reversed", [False, True])
def test_views_with_equal_strides_of_tensors_with_others(is_reversed: bool) -> None:
    """The graphs differ in the strides of the tensor that is viewed, which no node tells."""
    model = Chunks()
    engine = Engine(model, verify="never")
    x = batch(4, 4, 4)
    inputs = [x, x.transpose(0, 1).contiguous().transpose(0, 1)]
    for number in (0, 0, 1, 0, 1, 1, 0):
        x = inputs[number != is_reversed]
        assert_exact(engine, per_sample(model(x, (16, 4, 1))), model)


def test_new_constants_and_cotangents_that_are_not_finite() -> None:
    """Samples are where the constants say, whatever their cotangents are."""
    model = nn.Linear(3, 2, bias=False)
    engine = Engine(model, verify="never")
    x = batch(4, 3)
    for step, order in enumerate([*ORDERS, *ORDERS]):
        x[1] = 0.0 if step > 1 else 1.0  # a square root of zero, whose derivative is infinite
        losses = model(x).square().sum(1)[torch.tensor(order)].sqrt()
        gramian = engine.compute_gramian(losses)
        finite = losses > 0
        others = model(x[torch.tensor(order)][finite]).square().sum(1).sqrt()
        jacobian = reference_jacobian(others, model.parameters())
        assert_close_to_reference(gramian[finite][:, finite], jacobian @ jacobian.T)
        assert not gramian.diagonal()[~finite].isfinite().any()


FIRST, ROLLED, SAME = [0, 0, 0, 0], [3, 0, 1, 2], [0, 1, 2, 3]
MIXED = None


def by_index(h: Tensor, rows: list[int], columns: list[int]) -> Tensor:
    return h[rows, columns].square().sum(1)


def by_constants(h: Tensor, order: list[int] | None, *indices: list[int]) -> Tensor:
    return (mixing(4, order) @ h)[indices].square()


def by_strides(h: Tensor, order: list[int] | None, *strides: int) -> Tensor:
    return (mixing(4, order) @ h).as_strided_((4, 4), strides).square().sum(1)


def by_view(h: Tensor, order: list[int] | None, rows: int) -> Tensor:
    return (mixing(rows, order) @ h.reshape(rows, -1)).view(4, 2, 4).square().sum((0, 2))


def mixing(rows: int, order: list[int] | None) -> Tensor:
    """A matrix that puts rows in an order, or adds them up in some way."""
    return batch(rows, rows) if order is None else torch.eye(rows)[order]


# The first two calls have samples in one dimension, and further ones in another.
MOVES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], list[tuple[Any, ...]]]] = {
    "another index": (
        by_index,
        (4, 4, 5),
        [(SAME, [2, 0, 1, 1]), (SAME, [0, 3, 1, 1]), (FIRST, SAME), (FIRST, ROLLED)],
    ),
    "other constants": (
        by_constants,
        (4, 4),
        [(MIXED, FIRST, SAME), (MIXED, FIRST, SAME), (SAME, SAME, FIRST), (ROLLED, SAME, FIRST)],
    ),
    "other strides": (
        by_strides,
        (4, 4),
        [(MIXED, 1, 4), (MIXED, 1, 4), (SAME, 4, 1), (ROLLED, 4, 1)],
    ),
    "other views": (
        by_view,
        (4, 2, 4, 1),
        [(MIXED, 4), (MIXED, 4), ([*range(8)], 8), ([7, *range(7)], 8)],
    ),
}


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("name", MOVES)
def test_samples_in_other_dimensions(name: str) -> None:
    """What was proven where they lay in one dimension does not hold for another."""
    move, (*front, width), arguments = MOVES[name]
    model = nn.Linear(3, width)
    engine = Engine(model, verify="never")
    for given in (*arguments, arguments[0], arguments[-1]):
        assert_exact(engine, move(model(batch(*front, 3)).tanh(), *given), model)


@pytest.mark.parametrize("signs", [(1, -1, -1), (1, -1, -1, 1), (1, 1, 1, -1), (0, 0, 1, -1, -1)])
def test_samples_that_meet_and_cancel(signs: tuple[int, ...]) -> None:
    """Labels of 1 and -1 multiply a score of the whole batch, and add up to zero."""
    model = nn.ModuleDict({"first": nn.Linear(3, 2), "last": nn.Linear(2, 1)})
    engine = Engine(model, batch_dim=0, verify="never")
    score = model["last"](model["first"](batch(len(signs), 3)).tanh().mean(0)).squeeze()
    with pytest.raises(MixedSamplesError, match="samples are mixed"):
        engine.compute_gramian(torch.tensor(signs) * score)
