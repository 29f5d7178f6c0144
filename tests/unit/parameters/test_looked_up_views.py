"""Lookups in views of a parameter, whose rows may be along any of its dimensions."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import (
    EVERY_KIND,
    PER_SAMPLE,
    SEVERAL,
    Objectives,
    assert_close_to_reference,
    irregular,
)
from tests.unit.jacobians import assert_jacobian_is_exact

View = Callable[[Tensor], Tensor]
Read = Callable[[Tensor, Tensor], Tensor]

MATRICES = (4, 4), (6, 4)
CUBES = (3, 3, 3), (2, 3, 4)
VIEWS: dict[str, tuple[View, tuple[tuple[int, ...], ...]]] = {
    "itself": (lambda a: a, MATRICES),
    "T": (lambda a: a.T, MATRICES),
    "mT": (lambda a: a.mT, MATRICES),
    "permute": (lambda a: a.permute(1, 0), MATRICES),
    "movedim": (lambda a: a.movedim(0, 1), MATRICES),
    "T of T": (lambda a: a.T.T, MATRICES),
    "T of a view of T": (lambda a: a.T.unsqueeze(1).transpose(0, 2).squeeze(1).T, MATRICES),
    "part of T": (lambda a: a.T[1:3], MATRICES),
    "T of a part": (lambda a: a[1:].T, MATRICES),
    "T of every other column": (lambda a: a[:, ::2].T, MATRICES),
    "column of T": (lambda a: a.T[:, 1:2], MATRICES),
    "row of T, expanded": (lambda a: a.T[:1].expand(3, -1), MATRICES),
    "column of T, expanded": (lambda a: a.T[:, :1].expand(-1, 3), MATRICES),
    "T with more dimensions": (lambda a: a.T[:, None, :, None], MATRICES),
    "T of another shape": (lambda a: a.view(-1, 2).T, MATRICES),
    "diagonal": (lambda a: a.diagonal().unsqueeze(1), MATRICES),
    "copy of T": (lambda a: a.T.contiguous(), MATRICES),
    "T, scaled": (lambda a: a.T * 2, MATRICES),
    "T of one row or column or both": (lambda a: a.T, ((1, 5), (5, 1), (1, 1))),
    "vector, expanded": (lambda a: a.unsqueeze(1).expand(-1, 3), ((5,),)),
    "vector, expanded in front": (lambda a: a.expand(3, -1), ((5,),)),
    "last dimension first": (lambda a: a.movedim(2, 0), CUBES),
    "dimensions in reverse": (lambda a: a.permute(2, 1, 0), (*CUBES, (3, 1, 4))),
    "T of each matrix": (lambda a: a.mT, CUBES),
    "T of one matrix": (lambda a: a[1].T, CUBES),
}
CASES = [
    pytest.param(view, shape, id=f"{name}-{'x'.join(map(str, shape))}")
    for name, (view, shapes) in VIEWS.items()
    for shape in shapes
]
TRANSPOSED = [pytest.param(lambda a: a.T, shape, id=f"T-{shape}") for shape in MATRICES]


def _gather(i: Tensor, table: Tensor) -> Tensor:
    places = i.reshape(1, -1).expand(table[0].numel(), -1)
    return table.flatten(1).mT.gather(1, places).mT.unflatten(0, i.shape)


def _take_along_dim(i: Tensor, table: Tensor) -> Tensor:
    return torch.take_along_dim(table.flatten(1), i.reshape(-1, 1), 0).unflatten(0, i.shape)


def _places(i: Tensor, table: Tensor) -> Tensor:
    columns = table[0].numel()
    return table.flatten(1)[i, i % columns].unsqueeze(2).expand(-1, -1, columns)


READS: dict[str, Read] = {
    "indices": lambda i, table: table[i],
    "indices from the end": lambda i, table: table[i - len(table)],
    "embedding": lambda i, table: F.embedding(i, table.flatten(1)),
    "torch.embedding": lambda i, table: torch.embedding(table.flatten(1), i),
    "padding": lambda i, table: F.embedding(i, table.flatten(1), padding_idx=0),
    "method index_select": lambda i, table: table.index_select(0, i[:, 0]),
    "index_select": lambda i, table: torch.index_select(table, 0, i.flatten()).unflatten(
        0, i.shape
    ),
    "sum of a bag": lambda i, table: F.embedding_bag(i, table.flatten(1), mode="sum"),
    "mean of a bag": lambda i, table: F.embedding_bag(i, table.flatten(1)),
    "gather": _gather,
    "take_along_dim": _take_along_dim,
    "places": _places,
    "one by one": lambda i, table: torch.stack([table[each] for each in i]),
}


class Reader(nn.Module):
    """Reads rows of a view of a parameter, ``(B, positions, columns)``, and passes them on."""

    def __init__(self, view: View, shape: tuple[int, ...], read: Read) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(shape))
        self.view, self.read = view, read

    def forward(self, i: Tensor) -> Tensor:
        view = self.view(self.table)
        rows = self.read(i % len(view), view)
        return self.passed_on(rows.reshape(len(i), -1, view[0].numel()).tanh(), i)

    def passed_on(self, rows: Tensor, i: Tensor) -> Tensor:
        del i
        return rows


class ToView(Reader):
    """The view is also the weight of an output layer: ``A.T[i].tanh() @ A``."""

    def passed_on(self, rows: Tensor, i: Tensor) -> Tensor:
        del i
        return rows @ self.view(self.table).flatten(1).T


class ToWeight(Reader):
    """The parameter is also a weight of its own shape."""

    def passed_on(self, rows: Tensor, i: Tensor) -> Tensor:
        del i
        weight = self.table.flatten(1) if self.table.dim() > 1 else self.table.unsqueeze(1)
        return F.linear(rows.sum((1, 2)).unsqueeze(1).expand(-1, weight.shape[1]), weight)


class ToLookup(Reader):
    """The parameter is also read by its own first dimension."""

    def passed_on(self, rows: Tensor, i: Tensor) -> Tensor:
        read = self.table[i.flip(1) % len(self.table)].flatten(1)
        return rows.sum((1, 2)).unsqueeze(1) + read.sin()


USES = pytest.mark.parametrize("make", [Reader, ToView, ToWeight, ToLookup])


def tokens(samples: int = 3) -> Tensor:
    return torch.randint(12, (samples, 5))


@USES
@pytest.mark.parametrize(("view", "shape"), CASES)
def test_views(view: View, shape: tuple[int, ...], make: type[Reader]) -> None:
    def make_model() -> nn.Module:
        return make(view, shape, READS["indices"])

    assert_jacobian_is_exact(make_model, tokens(), objectives=SEVERAL)


@USES
@pytest.mark.parametrize(("view", "shape"), TRANSPOSED)
@pytest.mark.parametrize("name", READS)
def test_reads(name: str, view: View, shape: tuple[int, ...], make: type[Reader]) -> None:
    assert_jacobian_is_exact(lambda: make(view, shape, READS[name]), tokens())


@pytest.mark.parametrize("make", [Reader, ToView, ToLookup])
@pytest.mark.parametrize(("limit", "keep"), [(1, "factors"), (200, "rows")])
@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
def test_pieces(objectives: Objectives, limit: int, keep: str, make: type[Reader]) -> None:
    """Objectives of each kind, where only some columns of a table have room at once."""

    def make_model() -> nn.Module:
        return make(lambda a: a.T, (6, 4), READS["embedding"])

    options = {"objectives": objectives, "keep": keep, "memory_limit_bytes": limit}
    assert_jacobian_is_exact(make_model, tokens(), **options)


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.T])
def test_empty_bags(view: View) -> None:
    """Some that read no row at all, beside lookups that do."""

    def read(i: Tensor, table: Tensor) -> Tensor:
        return F.embedding_bag(i.new_zeros(0), table, i.new_zeros(len(i)))

    def make_model() -> nn.Module:
        return ToLookup(view, (6, 4), read)

    assert_jacobian_is_exact(make_model, tokens())


@USES
@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.T])
@pytest.mark.parametrize("shape", MATRICES)
def test_parameters_that_are_stored_transposed(
    shape: tuple[int, int], view: View, make: type[Reader]
) -> None:
    """Their rows are along the last dimension of the storage."""

    def make_model() -> nn.Module:
        model = make(view, shape, READS["embedding"])
        model.table = nn.Parameter(torch.randn(shape[::-1]).T)
        return model

    assert_jacobian_is_exact(make_model, tokens())


@pytest.mark.parametrize("read", ["indices", "index_select"])
@pytest.mark.parametrize("shape", MATRICES)
def test_complex_parameters(shape: tuple[int, int], read: str) -> None:
    class Waves(Reader):
        def __init__(self) -> None:
            super().__init__(lambda a: a.T, shape, READS[read])
            self.table = nn.Parameter(torch.randn(shape, dtype=torch.complex128))

        def passed_on(self, rows: Tensor, i: Tensor) -> Tensor:
            del i
            return torch.view_as_real(rows @ self.table)

    assert_jacobian_is_exact(Waves, tokens())


@USES
@pytest.mark.parametrize("verify", ["never", "always"])
@pytest.mark.parametrize("shape", MATRICES)
def test_series(
    shape: tuple[int, int], verify: Literal["never", "always"], make: type[Reader]
) -> None:
    """Steps in which texts and their number change: fused, and of micro-batches."""
    model = make(lambda a: a.T, shape, READS["embedding"])
    engine = Engine(model, verify=verify)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for samples in (3, 3, 5, 2, 3):
        batches = [SEVERAL.of(model(tokens(n))) for n in (samples, 4)]
        first, jacobian = (_rows(model, *some) for some in (batches[:1], batches))
        weights = irregular(len(jacobian))
        some = weights[: len(first)]
        _, gramian = engine.backward(
            batches[0], lambda _, w=some: w, retain_graph=True, return_gramian=True
        )
        assert_close_to_reference(gramian, first @ first.T)
        assert_close_to_reference(model.table.grad.flatten(), some @ first)
        model.zero_grad()
        with engine.accumulate(lambda _, w=weights: w) as step:
            for losses in batches:
                step.add(losses)
        assert_close_to_reference(step.gramian, jacobian @ jacobian.T)
        assert_close_to_reference(model.table.grad.flatten(), weights @ jacobian)
        optimizer.step()
        model.zero_grad()


def _rows(model: nn.Module, *losses: Tensor) -> Tensor:
    return torch.cat([reference_jacobian(x, model.parameters()) for x in losses])


@pytest.mark.parametrize("makes", [*product([Reader, ToView, ToLookup], repeat=2)])
@pytest.mark.parametrize("shape", MATRICES)
def test_two_jacobians(shape: tuple[int, int], makes: Sequence[type[Reader]]) -> None:
    """Products of the rows of two batches, which are read by either dimension."""
    for views in product([lambda a: a, lambda a: a.T], repeat=2):
        models = [of(view, shape, READS["indices"]) for of, view in zip(makes, views, strict=True)]
        models[1].table = models[0].table
        engine = Engine(*models)
        losses = [PER_SAMPLE.of(model(tokens(n))) for model, n in zip(models, (3, 4), strict=True)]
        one, other = (_rows(models[0], x) for x in losses)
        first, second = (engine.jacobian(x) for x in losses)
        assert_close_to_reference(first.cross_gramian(second), one @ other.T)
        engine.remove()


@pytest.mark.parametrize(("view", "shape"), CASES)
@pytest.mark.parametrize("make", [ToView, ToLookup])
def test_sketches(view: View, shape: tuple[int, ...], make: type[Reader]) -> None:
    """They are those of a model that reads by a product with a matrix of zeros and ones."""

    def by_products(i: Tensor, table: Tensor) -> Tensor:
        return torch.tensordot(F.one_hot(i, len(table)).to(table.dtype), table, 1)

    model, twin = make(view, shape, READS["indices"]), make(view, shape, by_products)
    twin.load_state_dict(model.state_dict())
    i = tokens()
    found, expected = (
        Engine(of).sketch(PER_SAMPLE.of(of(i)), 8, seed=2).rows for of in (model, twin)
    )
    assert_close_to_reference(found, expected)


@pytest.mark.parametrize(("view", "shape"), TRANSPOSED)
def test_no_rows_of_a_table_are_made(view: View, shape: tuple[int, ...]) -> None:
    """A part of a table has rows, the whole one is read by any dimension without."""
    for of, plan in ((view, "lookup"), (lambda a: view(a)[:3], "rows")):
        model = Reader(of, shape, READS["embedding"])
        engine = Engine(model)
        engine.compute_gramian(PER_SAMPLE.of(model(tokens())))
        assert [x.plan for x in engine.report().parameters] == [plan]
