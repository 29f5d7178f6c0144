"""Moves: the samples of a node's input by what it saved, against what autograd shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._capture.forward.calls import kind_of, run_and_note
from autogram._capture.samples.proofs.carrying import Crossing
from autogram._capture.samples.proofs.moves import (
    SEVERAL,
    Passage,
    keeps_first,
    owners_of_input,
    owners_of_sum,
)
from tests.unit.waits import Waits

ORDER = torch.tensor([3, 0, 5, 1])
TWICE = torch.tensor([0, 2, 2, 5, -1])
MASK = torch.tensor([True, False, True, True, False, False])
MASKS = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1]]).bool()
PAIRS = torch.tensor([[0, 4], [2, 2], [5, 1]])


def put(indices: tuple[Tensor, ...], *sizes: int) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        y = torch.zeros(sizes)
        y[indices] = x
        return y

    return call


def joined(x: Tensor) -> Tensor:
    return torch.cat([torch.ones(2, 4, requires_grad=True), x, x.new_ones(3, 4).requires_grad_()])


def change(y: Tensor, place: Any, by: Tensor | float) -> Tensor:
    """Changes a slice of a tensor in a call that is noted."""
    run_and_note(kind_of(Tensor.__setitem__), (y, place, by), {})
    return y


def view_of_changed(x: Tensor) -> Tensor:
    y = x.clone()
    part = y[:, 1:3]
    change(y, (slice(None), 0), 2.0)
    return part


def unnoted(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = 2.0
    return y


def gradient_of(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Takes a cotangent of what a call takes from a tensor ``(6, 4)`` there, as a torch call."""

    def differentiate(cotangent: Tensor) -> Tensor:
        x = torch.rand(6, 4, requires_grad=True)
        return torch.autograd.grad(call(x), x, cotangent, create_graph=True)[0]

    return differentiate


# By name: the sizes of an input, a call, and the number of the input of its node.
MOVING: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], int]] = {
    "index": ((6, 4), lambda x: x[TWICE], 0),
    "index of pairs": ((6, 4), lambda x: x[PAIRS], 0),
    "two indices": ((6, 4, 2), lambda x: x[TWICE, ORDER[[0, 1, 1, 3, 3]] % 4], 0),
    "indices that are crossed": ((6, 4), lambda x: x[ORDER[:, None], torch.arange(3)], 0),
    "indices apart": ((6, 2, 4), lambda x: x[ORDER, :, torch.arange(4)], 0),
    "index without dimensions": ((6, 4), lambda x: x[ORDER[0]], 0),
    "gradient of an index": ((5, 4), gradient_of(lambda x: x[TWICE]), 1),
    "gradient of a slice": ((3, 4), gradient_of(lambda x: x[1:6:2]), 0),
    "gradient of one row": ((4,), gradient_of(lambda x: x[-2]), 0),
    "padded": ((6, 4), lambda x: F.pad(x, (0, 0, 2, 1)), 0),
    "padded and cut": ((6, 4), lambda x: F.pad(x, (0, 0, 1, -1)), 0),
    "index_select of one place": ((6, 4), lambda x: x.index_select(0, ORDER[0]), 0),
    "index_copy of one place": ((1,), lambda x: torch.zeros(6).index_copy(0, ORDER[0], x), 1),
    "index_add of one place": ((1, 4), lambda x: torch.zeros(6, 4).index_add(0, ORDER[0], x), 1),
    "put in one place": ((4,), lambda x: torch.zeros(6, 4).index_put((ORDER[0],), x), 1),
    "mask": ((6, 4), lambda x: x[MASK], 0),
    "mask of two dimensions": ((6, 3, 4), lambda x: x[MASKS], 0),
    "index_select": ((6, 4), lambda x: x.index_select(0, ORDER), 0),
    "gather": ((6, 4), lambda x: x.gather(0, ORDER[:, None].expand(-1, 4)), 0),
    "put": ((4, 4), put((ORDER,), 6, 4), 1),
    "put by a mask": ((3, 4), put((MASK,), 6, 4), 1),
    "put by a mask of two dimensions": ((9, 4), put((MASKS,), 6, 3, 4), 1),
    "put pairs": ((3, 2, 4), put((PAIRS,), 6, 4), 1),
    "index_add": ((5, 4), lambda x: torch.zeros(6, 4).index_add(0, TWICE % 6, x), 1),
    "index_copy": ((4, 4), lambda x: torch.zeros(6, 4).index_copy(0, ORDER, x), 1),
    "scatter": ((4, 4), lambda x: torch.zeros(6, 4).scatter(0, ORDER[:, None].expand(-1, 4), x), 1),
    "scatter_add": (
        (5, 4),
        lambda x: torch.zeros(6, 4).scatter_add(0, (TWICE % 6)[:, None].expand(-1, 4), x),
        1,
    ),
    "scatter_reduce": (
        (5, 4),
        lambda x: torch.zeros(6, 4).scatter_reduce(
            0, (TWICE % 6)[:, None].expand(-1, 4), x, "mean"
        ),
        1,
    ),
    "put by masked_scatter": (
        (3, 4),
        lambda x: torch.zeros(6, 4).masked_scatter(MASK[:, None], x),
        1,
    ),
    "elements put by masked_scatter": (
        (9,),
        lambda x: torch.zeros(6, 3).masked_scatter(MASKS, x),
        1,
    ),
    "slice": ((6, 4), lambda x: x[1:5:2], 0),
    "slice from the end": ((6, 4), lambda x: x[-3:-1], 0),
    "one place": ((6, 4), lambda x: x[-2], 0),
    "joined": ((4, 4), joined, 1),
    "view of pairs": ((3, 2, 4), lambda x: x.view(6, 4), 0),
    "view as pairs": ((6, 4), lambda x: x.view(3, 2, 4), 0),
    "view of all": ((6, 4), lambda x: x.view(24), 0),
}
STAYING: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], int]] = {
    "sin": ((6, 4), torch.sin, 0),
    "broadcast": ((6, 1), lambda x: x * torch.ones(6, 4), 0),
    "linear": ((6, 4), lambda x: F.linear(x, torch.ones(3, 4, requires_grad=True)), 0),
    "product with a vector": ((6, 4), lambda x: x @ torch.ones(4), 0),
    "sum": ((6, 4), lambda x: x.sum(1), 0),
    "mean of two": ((6, 4, 2), lambda x: x.mean((-1, 1)), 0),
    "max": ((6, 4), lambda x: x.max(1)[0], 0),
    "transpose": ((6, 4, 2), lambda x: x.transpose(1, 2), 0),
    "permute": ((6, 4, 2), lambda x: x.permute(0, 2, 1), 0),
    "unsqueeze": ((6, 4), lambda x: x.unsqueeze(-1), 0),
    "squeeze": ((6, 1), lambda x: x.squeeze(), 0),
    "one column": ((6, 4), lambda x: x[:, 1], 0),
    "index of columns": ((6, 4), lambda x: x[:, ORDER % 4], 0),
    "joined columns": ((6, 4), lambda x: torch.cat([x, x.sin()], 1), 0),
    "softmax": ((6, 4), lambda x: x.softmax(1), 0),
    "layer_norm": ((6, 4), lambda x: F.layer_norm(x, (4,)), 0),
    "loss": ((6, 4), lambda x: F.nll_loss(x, torch.zeros(6).long(), reduction="none"), 0),
    "index_add to it": ((6, 4), lambda x: x.index_add(0, ORDER, torch.ones(4, 4)), 0),
    "put in it": ((6, 4), lambda x: x.index_put((ORDER,), torch.ones(4, 4)), 0),
    "columns that are padded": ((6, 4), lambda x: F.pad(x, (1, 2)), 0),
    "a column is changed": ((6, 4), lambda x: change(x.clone(), (..., 1), 2.0), 0),
    "what a column is changed by": ((6,), lambda x: change(torch.zeros(6, 4), (..., 1), x), 1),
    "what two columns are changed by": (
        (6, 1),
        lambda x: change(torch.zeros(6, 4), (..., slice(2)), x),
        1,
    ),
    "view of what was changed": ((6, 4), view_of_changed, 0),
    "as_strided": ((6, 4), lambda x: x.as_strided((6, 2), (4, 1), 1), 0),
}
UNKNOWN: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], int]] = {
    "turned": ((6, 6), lambda x: x.T, 0),
    "transposed": ((6, 6), lambda x: x.transpose(-1, -2), 0),
    "mixed": ((6, 4), lambda x: torch.ones(6, 6) @ x, 1),
    "flipped": ((6, 4), lambda x: x.flip(0), 0),
    "rolled": ((6, 4), lambda x: x.roll(1, 0), 0),
    "broadcast rows": ((1, 4), lambda x: x * torch.ones(6, 4), 0),
    "added up": ((6, 6, 2), lambda x: x.sum(0), 0),
    "gathered by element": (
        (6, 4),
        lambda x: x.gather(0, (torch.arange(24) % 5).view(6, 4)),
        0,
    ),
    "joined with a constant": ((4, 4), lambda x: torch.cat([torch.ones(2, 4), x]), 1),
    "changed in a call that is not seen": ((6, 4), unnoted, 0),
    "what all rows are changed by": (
        (4,),
        lambda x: change(torch.zeros(4, 5), (slice(None), slice(1, 5)), x),
        1,
    ),
    "what some rows are changed by": ((4,), lambda x: change(torch.zeros(6, 4), (1, ...), x), 1),
    "turned by as_strided": ((4, 4), lambda x: x.as_strided((4, 4), (1, 4)), 0),
    "windows": ((6,), lambda x: x.as_strided((4, 3), (1, 1)), 0),
    "more than is put by masked_scatter": (
        (4, 4),
        lambda x: torch.zeros(6, 4).masked_scatter(MASK[:, None], x),
        1,
    ),
    "more than masked_scatter could put": (
        (7, 4),
        lambda x: torch.zeros(6, 4).masked_scatter(MASK[:, None], x),
        1,
    ),
    "one row for all places of a mask": ((1, 4), put((MASK,), 6, 4), 1),
    "one matrix for all places, of as many rows": ((4, 4), put((ORDER,), 6, 4, 4), 1),
    "one row for all places of a mask, as long as they": ((3,), put((MASK,), 6, 3), 1),
}


def passage_of(call: Callable[[Tensor], Tensor], x: Tensor, position: int, owners: Tensor):
    """The way from the result of a call to its input, and what goes that way."""
    result = call(x)
    node, doubts = result.grad_fn, list[Tensor]()
    (shape,) = [tuple(metadata.shape) for metadata in node._input_metadata][:1]
    passage = Passage(node, position, tuple(x.shape), (shape,), (owners,), doubts)
    seen = torch.full(x.shape[:1], -1)
    for sample in owners.unique().tolist():
        cotangent = torch.rand(result.shape) + 1
        along = owners.view(-1, *(1,) * (result.dim() - 1)) if owners.dim() else owners
        (found,) = torch.autograd.grad(result, x, cotangent * (along == sample), retain_graph=True)
        there = found.reshape(len(found), -1).abs().amax(1) != 0
        assert (seen[there] == -1).all(), "two samples meet"
        seen[there] = sample
    return passage, seen


@pytest.mark.parametrize(("sizes", "call", "position"), MOVING.values(), ids=MOVING)
def test_places_that_are_moved(sizes, call, position) -> None:
    x = torch.rand(sizes, requires_grad=True)
    result = call(x)
    if result.dim() < x.dim() and result.shape[0] != 24:
        owners = torch.tensor(1)
    else:  # what is read of one place of the input is of one sample
        numbers = torch.arange(x.shape[0]).view(-1, *(1,) * (x.dim() - 1)) + 1.0
        marks = call((numbers + torch.zeros(sizes)).requires_grad_())
        owners = marks.detach().reshape(len(marks), -1).amax(1).long() % 3
        if position == 1:  # for what is put in places, the places decide
            owners = torch.arange(len(result)) % 3
    passage, seen = passage_of(call, x, position, owners)
    with Waits() as waits:
        found = owners_of_input(passage)
    assert not waits.names
    assert found is not None
    assert not any(passage.doubts)
    assert torch.equal(torch.where(seen < 0, -1, found), seen)
    edge = Crossing(passage.node, position, tuple(result.shape), sizes)
    assert not keeps_first(edge) or torch.equal(found, owners)


def test_places_where_samples_meet() -> None:
    """They stay so, and may be cut off."""
    x = torch.rand(6, 4, requires_grad=True)
    owners = torch.tensor([0, 1, 2, 1, 1])
    node = x[TWICE].grad_fn
    found = owners_of_input(Passage(node, 0, (6, 4), ((5, 4),), (owners,), []))
    assert found is not None
    assert found.tolist() == [0, -1, SEVERAL, -1, -1, 1]
    assert owners_of_sum([found, torch.tensor(1)]).tolist() == [SEVERAL, 1, SEVERAL, 1, 1, 1]
    pairs = x.view(3, 2, 4).flatten(0, 1)
    (onward,) = (x for x, _ in pairs.grad_fn.next_functions)
    assert onward.name() == "ViewBackward0"
    shapes = (3, 2, 4), (6, 4)
    found = owners_of_input(Passage(onward, 0, shapes[1], shapes[:1], (found[:3],), []))
    assert found is not None
    assert found.tolist() == [0, 0, -1, -1, SEVERAL, SEVERAL]
    found = owners_of_input(
        Passage(F.pad(x, (0, 0, 0, -2)).grad_fn, 0, (6, 4), ((4, 4),), (found[:4],), [])
    )
    assert found is not None
    assert found.tolist() == [0, 0, -1, -1, -1, -1]


@pytest.mark.parametrize(("sizes", "call", "position"), STAYING.values(), ids=STAYING)
def test_places_that_stay(sizes, call, position) -> None:
    owners = torch.tensor([2, 0, 1, 1, 0, 2])
    passage, seen = passage_of(call, torch.rand(sizes, requires_grad=True), position, owners)
    found = owners_of_input(passage)
    assert found is owners
    assert torch.equal(torch.where(seen < 0, -1, found), seen)


@pytest.mark.parametrize(("sizes", "call", "position"), UNKNOWN.values(), ids=UNKNOWN)
def test_places_that_nobody_knows(sizes, call, position) -> None:
    result = call(torch.rand(sizes, requires_grad=True))
    owners, doubts = torch.arange(len(result)), list[Tensor]()
    shape = tuple(result.shape)
    passage = Passage(result.grad_fn, position, sizes, (shape,), (owners,), doubts)
    assert owners_of_input(passage) is None or any(doubts)
    assert not keeps_first(Crossing(result.grad_fn, position, shape, sizes))


def test_pieces() -> None:
    x = torch.rand(6, 4, requires_grad=True)
    for pieces in (x.split([1, 3, 2]), x.unbind(), x.chunk(2)):
        node = pieces[0].grad_fn
        shapes = tuple(tuple(piece.shape) for piece in pieces)
        owners = [torch.tensor(i) for i in range(len(pieces))]
        owners[1] = None
        found = owners_of_input(Passage(node, 0, (6, 4), shapes, tuple(owners), []))
        sizes = [len(piece) if piece.dim() == 2 else 1 for piece in pieces]
        numbers = torch.arange(len(pieces)).repeat_interleave(torch.tensor(sizes))
        assert torch.equal(found, torch.where(numbers == 1, -1, numbers))


def test_places_with_irregular_rows() -> None:
    """A place is of the sample that its rows are of, or of several."""
    x = torch.rand(3, 4, 2, requires_grad=True)
    alone, shared = torch.tensor([-1, 1, 1, -1]), torch.tensor([-1, 1, 0, -1])
    for given, expected in ((alone, 1), (shared, SEVERAL)):
        passage = Passage(x[2].grad_fn, 0, x.shape, ((4, 2),), (given,), [])
        found = owners_of_input(passage)
        assert found is not None
        assert found.tolist() == [-1, -1, expected]
        node = x.unbind()[0].grad_fn
        owners = torch.tensor(2), None, given
        found = owners_of_input(Passage(node, 0, x.shape, ((4, 2),) * 3, owners, []))
        assert found is not None
        assert found.tolist() == [2, -1, expected]


def test_stacked() -> None:
    parts = [torch.rand(4, requires_grad=True) for _ in range(3)]
    node, owners = torch.stack(parts).grad_fn, torch.tensor([2, 0, 1])
    for position in range(3):
        found = owners_of_input(Passage(node, position, (4,), ((3, 4),), (owners,), []))
        assert found is not None
        assert not found.dim()
        assert int(found) == owners[position]
