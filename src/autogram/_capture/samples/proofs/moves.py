"""Moves: where a node takes the samples of places along the first dimension, by what it saved.

The owners of a tensor are the samples of its places along the first dimension, ``(n,)``; or one
number, where all that arrives at the tensor is of one sample. Places of no sample have -1, and
those where samples meet `SEVERAL`: a later node may cut these off, as the row that stands for
missing neighbours in a graph. A node that neither keeps the first dimension nor is in the table of
moves takes samples to unknown places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from autogram._capture.autograd.graph import VIEWS, kind_of_node, use_of
from autogram._capture.autograd.slices import CHANGE, changed_slice, kept_by_slice, kept_dims
from autogram._capture.places.transfers.step import signed
from autogram._capture.samples.proofs.carrying import (
    Crossing,
    Shape,
    carried,
    is_packed,
    rank_of_indexed,
    wrapped,
)

_NONE, SEVERAL = -1, 2**62


class Passage(NamedTuple):
    """The way of cotangents from the results of a node to one of its inputs."""

    node: Any
    position: int
    given: Shape
    """The shape of the input."""
    results: tuple[Shape, ...]
    owners: tuple[Tensor | None, ...]
    """The owners of each result, or ``None`` where nothing arrives."""
    doubts: list[Tensor]
    """Gets booleans: whether values are such that a move is another one."""


# Gives the owners of an input, from those of the first result that has some.
Move = Callable[[Passage, Tensor], Tensor | None]


def owners_of_input(passage: Passage) -> Tensor | None:
    """The owners of an input of a node, or ``None`` if they are unknown."""
    move = _move_of(passage.node, passage.position, len(passage.given)) or _stay
    first = next(owners for owners in passage.owners if owners is not None)
    # An input that is a part of the result is of the sample that all of the result is of.
    owners = move(passage, first) if first.dim() or move in _SPREADING else first
    if owners is not None and owners.dim() and owners.shape != passage.given[:1]:
        return None
    return owners


def keeps_first(edge: Crossing) -> bool:
    """Whether places of the first dimension stay, as long as input and result have as many.

    That does not depend on other sizes.
    """
    is_move = _move_of(edge.node, edge.position, len(edge.given)) is not None
    operation = kind_of_node(edge.node.__class__).operation
    return not is_move and operation not in (*VIEWS, "ConstantPadNd") and _stays_in_first(edge)


def owners_of_sum(parts: Iterable[Tensor]) -> Tensor:
    """The owners of a sum of tensors of one shape."""
    total, *others = parts
    for owners in others:
        if owners is total:
            continue
        own, other = torch.broadcast_tensors(total, owners.to(total.device))
        is_shared = (own != other) & (own >= 0) & (other >= 0)
        total = torch.maximum(own, other).masked_fill(is_shared, SEVERAL)
    return total


def _move_of(node: Any, position: int, rank: int) -> Move | None:
    """How a node moves places along the first dimension of an input of some rank, if it does."""
    operation = kind_of_node(node.__class__).operation
    move, moved = _MOVES.get(operation, (None, None))
    if move is None or moved not in (None, position):
        return None
    if operation in ("Index", "IndexPut", "IndexPutImpl"):
        is_packed_up = is_packed(node._raw_saved_indices)
        return None if is_packed_up or node._saved_indices[0] is None else move
    if operation in (CHANGE, "AsStrided", "MaskedScatter"):
        return move
    rank = max(rank, len(node._input_metadata[0].shape))
    if operation == "ConstantPadNd":
        return move if len(node._saved_pad) == 2 * rank else None
    return move if wrapped(node._saved_dim, rank) == 0 else None


def _stay(passage: Passage, first: Tensor) -> Tensor | None:
    """For nodes that keep the first dimension, and any nodes if all is of one sample."""
    pairs = zip(passage.owners, passage.results, strict=True)
    arrived = [(owners, shape) for owners, shape in pairs if owners is not None]
    if any(owners.dim() for owners, _ in arrived):
        if kind_of_node(passage.node.__class__).operation in VIEWS:
            return _viewed(passage, first)
        edges = [
            Crossing(passage.node, passage.position, shape, passage.given) for _, shape in arrived
        ]
        if not all(map(_stays_in_first, edges)):
            return None
    return owners_of_sum([owners for owners, _ in arrived])


def _stays_in_first(edge: Crossing) -> bool:
    """Whether the places of the first dimension of a result are those of the input, in order."""
    node, _, result, given = edge
    operation, rank = kind_of_node(node.__class__).operation, max(len(result), len(given))
    if result[:1] != given[:1] or operation in _TURNING:
        return False
    if use_of(node) is not None:
        return result == given
    if operation == "Transpose":
        return 0 not in (wrapped(node._saved_dim0, rank), wrapped(node._saved_dim1, rank))
    if operation == "Permute":
        return wrapped(node._saved_dims[0], rank) == 0
    if 0 not in carried(edge):
        return False
    if len(result) == len(given) or operation in _IN_FRONT:
        return True
    dims = getattr(node, "_saved_dim", None)
    dims = dims if isinstance(dims, tuple) else (dims,)
    return not any(dim is None or wrapped(dim, rank) == 0 for dim in dims)


def _viewed(passage: Passage, owners: Tensor) -> Tensor | None:
    """A view that puts places together, or takes them apart."""
    (result,), given = passage.results, passage.given
    count = given[0] if given else 1
    if result[0] == count:
        return owners if given else owners[0]
    if result[0] and count and count % result[0] == 0:
        return owners.repeat_interleave(count // result[0])
    if count and result[0] % count == 0:
        return _unanimous(owners.view(count, -1))
    return None


def _unanimous(owners: Tensor) -> Tensor:
    """The owner of each place, from those of its parts: ``(n, parts)``."""
    if not owners.numel():
        return owners.new_full(owners.shape[:1], _NONE)
    found = owners.amax(1)
    is_shared = ((owners >= 0) & (owners != found.unsqueeze(1))).any(1)
    return found.masked_fill(is_shared, SEVERAL)


def _in_one_place(owners: Tensor) -> Tensor:
    """The owner of a place, where the tensor that has these owners is what lies in it."""
    return _unanimous(owners.unsqueeze(0)).squeeze(0) if owners.dim() else owners


def _places(passage: Passage, size: int, taken: Shape) -> Tensor | None:
    """The places that an index has, ``(n, *others)``, of some along the first dimension.

    What is taken from there, or put there, has the shape ``taken``.
    """
    node = passage.node
    if hasattr(node, "_saved_indices"):
        indices = [index for index in node._saved_indices if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            is_mask = len(indices) == 1 and indices[0].dim() and taken
            return _marked(indices[0], taken[0], passage.doubts) if is_mask else None
        places = torch.broadcast_tensors(*indices)[0]
    elif is_packed(node._raw_saved_index):
        return None
    else:
        places = node._saved_index if node._saved_index.dim() else node._saved_index.view(1)
        if places.dim() > 1 and places.numel():  # of single elements
            each = places.flatten(1)
            passage.doubts.append((each != each[:, :1]).any())
            places = each[:, 0]
    return torch.where(places < 0, places + size, places).long()


def _marked(mask: Tensor, count: int, doubts: list[Tensor]) -> Tensor:
    """The place along the first dimension of each element that a mask has, if these are ``count``.

    ``nonzero`` would let the host wait for a GPU, as it does not know how many there are.
    """
    is_unmarked = (mask == 0).flatten()
    doubts.append(is_unmarked.numel() - is_unmarked.sum() != count)  # fewer are broadcast
    return is_unmarked.argsort(stable=True)[:count] // max(prod(mask.shape[1:]), 1)


def _from_places(passage: Passage, owners: Tensor) -> Tensor | None:
    """For results that have some places of the input, which several of them may have in common."""
    (result,) = passage.results
    places = _places(passage, passage.given[0], result)
    if places is None or result[: places.dim()] != places.shape:
        return None
    if owners.dim() and not places.dim():
        return None  # the index leaves no dimension, and the owners are along another one
    each, places = owners.to(places.device), places.flatten()
    if each.dim():
        each = each.repeat_interleave(places.numel() // max(each.numel(), 1))
    each = each.expand(places.shape)
    found = each.new_full(passage.given[:1], _NONE).scatter_reduce(0, places, each, "amax")
    least = each.new_full(passage.given[:1], SEVERAL)
    least.scatter_reduce_(0, places, each.masked_fill(each < 0, SEVERAL), "amin")
    return found.masked_fill((found >= 0) & (found != least), SEVERAL)


def _to_places(passage: Passage, owners: Tensor) -> Tensor | None:
    """For an input that is put in some places of the result."""
    (result,), given = passage.results, passage.given
    places, rank = _places(passage, result[0], given), len(result)
    if hasattr(passage.node, "_saved_indices"):
        rank = rank_of_indexed(passage.node, rank)
    if places is None or given[: places.dim()] != places.shape or len(given) != rank:
        return None  # or it may be broadcast along the places
    # Indexing by a tensor without dimensions would read it on the host.
    each = owners.to(places.device).index_select(0, places.flatten()).view(places.shape)
    return each if each.dim() < 2 else _unanimous(each.flatten(1))


def _to_masked(passage: Passage, owners: Tensor) -> Tensor | None:
    """For an input whose elements are put, in order, in the places of a mask."""
    (result,), given = passage.results, passage.given
    if is_packed(passage.node._raw_saved_mask) or not given or prod(given) > prod(result):
        return None
    mask = passage.node._saved_mask.expand(result)
    places = _marked(mask, prod(given), passage.doubts)
    each = owners.to(places.device).index_select(0, places)
    return _unanimous(each.view(given[0], prod(given[1:])))


def _from_slice(passage: Passage, owners: Tensor) -> Tensor | None:
    """For a result that is a slice of the input, or one place of it."""
    found, there = owners.new_full(passage.given[:1], _NONE), _sliced(passage.node)
    if isinstance(there, int):
        owners = _in_one_place(owners)
    elif owners.dim() and owners.shape != found[there].shape:
        return None
    found[there] = owners
    return found


def _to_slice(passage: Passage, owners: Tensor) -> Tensor:
    """For an input that is a slice of the result, or one place of it."""
    return owners[_sliced(passage.node)]


def _to_padded(passage: Passage, owners: Tensor) -> Tensor:
    """For an input that is padded with a constant, or cut where it is padded by less than zero."""
    before, after = (-signed(number) for number in passage.node._saved_pad[-2:])
    return pad(owners, (before, after), value=_NONE)


def _to_changed(passage: Passage, owners: Tensor) -> Tensor | None:
    """For a tensor of which a slice was changed, and what that was changed by.

    The slice must have all places, in order.
    """
    if (found := changed_slice(passage.node)) is None:
        return None
    kept, missing = kept_by_slice(found), len(found.part.shape) - len(passage.given)
    return owners if passage.position == 0 or kept[:1] == (missing,) else None


def _to_viewed(passage: Passage, owners: Tensor) -> Tensor | None:
    """For a tensor of which a view by ``as_strided`` has all places, in order."""
    return owners if (0, 0) in kept_dims(passage.node) else None


def _sliced(node: Any) -> slice | int:
    """The places along the first dimension of a slice, or the one that is selected."""
    if hasattr(node, "_saved_step"):
        return slice(signed(node._saved_start), signed(node._saved_end), node._saved_step)
    return signed(node._saved_index)


def _from_pieces(passage: Passage, like: Tensor) -> Tensor | None:
    """For results that are all pieces of the input, in order, or all its places."""
    is_unbound = kind_of_node(passage.node.__class__).operation == "Unbind"
    pieces = []
    for owners, shape in zip(passage.owners, passage.results, strict=True):
        size = 1 if is_unbound else shape[0]
        if owners is None:
            pieces.append(like.new_full((size,), _NONE))
        else:
            own = _in_one_place(owners) if is_unbound else owners
            pieces.append(own.to(like.device).expand(size))
    return torch.cat(pieces)


def _to_piece(passage: Passage, owners: Tensor) -> Tensor | None:
    """For inputs that are joined in order, or are single places of the result."""
    (result,), node = passage.results, passage.node
    if kind_of_node(node.__class__).operation == "Stack":
        return owners[passage.position] if len(node.next_functions) == len(owners) else None
    if any(following is None for following, _ in node.next_functions):
        return None  # the node does not tell how long constants are
    shapes = [before._input_metadata[number].shape for before, number in node.next_functions]
    sizes = [shape[0] if len(shape) == len(result) else 0 for shape in shapes]
    return owners.split(sizes)[passage.position] if sum(sizes) == len(owners) else None


# Moves, and stays, that tell of the input also where all of the result is of one sample.
_SPREADING = (_stay, _from_places, _from_slice, _from_pieces)
# Operations that move places along the dimension that they saved, and the input whose places they
# move, or `None` for each.
_MOVES: dict[str, tuple[Move, int | None]] = {
    **dict.fromkeys(("Index", "IndexSelect", "Gather"), (_from_places, 0)),
    **dict.fromkeys(("IndexPut", "IndexPutImpl", "IndexAdd", "IndexCopy"), (_to_places, 1)),
    **dict.fromkeys(("IndexReduce", "Scatter", "ScatterAdd", "ScatterReduce"), (_to_places, 1)),
    "MaskedScatter": (_to_masked, 1),
    **dict.fromkeys(("Slice", "Select"), (_from_slice, None)),
    **dict.fromkeys(("SliceBackward", "SelectBackward"), (_to_slice, None)),
    "ConstantPadNd": (_to_padded, None),
    **dict.fromkeys(("Split", "SplitWithSizes", "Unbind"), (_from_pieces, None)),
    **dict.fromkeys(("UnsafeSplit", "UnsafeSplitWithSizes"), (_from_pieces, None)),
    **dict.fromkeys(("Cat", "Stack"), (_to_piece, None)),
    CHANGE: (_to_changed, None),
    "AsStrided": (_to_viewed, None),
}
# Operations that carry the first dimension of their result, but not to that of their input.
_TURNING = ("T", "Diagonal", "DiagonalBackward", "DiagEmbed", "Trilinear", "Unfold")
# Operations of other ranks that keep the first dimension where its size stays, and save no ``dim``.
_IN_FRONT = ("Index", "IndexPut", "IndexPutImpl", "Squeeze", "Mv", "NllLoss", "NllLoss2D")
