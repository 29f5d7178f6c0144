"""Places behind views, slices, joined tensors and copies."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from autogram._capture.autograd.graph import VIEWS, kind_of_node
from autogram._capture.places.places import EMPTY, SEVERAL, Places, Shape
from autogram._capture.places.transfers.moved import picked, pulled
from autogram._capture.places.transfers.step import (
    NodeStep,
    all_together,
    by_element,
    by_input,
    signed,
    table,
)

# Squares of samples up to this number, and their sums, are exact in float64.
_MOST_IN_COPIES = 2**16


def _permuted(step: NodeStep, places: Places) -> Places:
    """The result has another order of dimensions."""
    rank = len(step.result)
    order = list(range(rank))
    if step.has("dims"):
        for dim, source in enumerate(step.argument("dims")):
            order[signed(source) % rank] = dim
    elif rank > 1:
        is_transposed = step.has("dim0")
        one, two = (step.dim("dim0"), step.dim("dim1")) if is_transposed else (0, 1)
        order[one], order[two] = two, one
    return places.permuted(order)


def _viewed(step: NodeStep, places: Places) -> Places:
    """The result has the same elements, in order, in another shape."""
    return places.viewed(step.given)


def _unsqueezed(step: NodeStep, places: Places) -> Places:
    """The result has an additional dimension."""
    return places.without(signed(step.argument("dim")) % len(step.result))


def _complex_view(step: NodeStep, places: Places) -> Places:
    """A real view of complex numbers, or the reverse: pairs along a last dimension."""
    rank = len(step.result)
    return places.without(rank - 1) if rank > len(step.given) else places.inserted(rank, 2)


def _sliced(step: NodeStep, size: int) -> torch.Tensor:
    """The positions of a slice, or the single selected position."""
    positions = torch.arange(size, device="cpu")
    if step.has("index"):
        return positions[signed(step.argument("index"))]
    start, end = (step.argument(name) for name in ("start", "end"))
    ends = [None if number is None else signed(number) for number in (start, end)]
    return positions[ends[0] : ends[1] : step.argument("step")]


def _from_slice(step: NodeStep, places: Places) -> Places:
    """The result is a slice of the input, or one position of it."""
    dim, given = step.dim(), step.given
    count = int(len(step.result) == len(given))
    if count and step.result[dim] == given[dim]:
        return places
    return pulled(places, [dim], dim, count, given, lambda: _sliced(step, given[dim]))


def _to_slice(step: NodeStep, places: Places) -> Places:
    """The input is a slice of the result, or one position of it."""
    dim = step.dim()
    return picked(places, [dim], dim, _sliced(step, step.result[dim]))


def _padded(step: NodeStep, places: Places) -> Places:
    """The input is padded, or cut if the padding is negative."""
    numbers = [signed(number) for number in step.argument("pad")]
    for i, (before, after) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
        if before or after:
            places = places.padded(len(step.result) - 1 - i, -before, -after)
    return places


def _joined(step: NodeStep, places: Places) -> Places:
    """The input is one of several that are joined along a dimension, or stacked."""
    node, given, result = step.node, step.given, step.result
    dim = signed(step.argument("dim")) % len(result)
    if len(given) < len(result):
        if kind_of_node(type(node)).operation != "Stack":
            return Places.nowhere(given)  # an empty tensor, which `torch.cat` ignores
        return picked(places, [dim], dim, torch.tensor(step.position, device="cpu"))
    if not places.varies(dim):
        return places.resized(dim, given[dim])
    if not prod(given):
        return Places.nowhere(given)
    # The node does not tell the lengths of constants. It returns views of what it is given.
    step.is_hidden = any(child is None for child, _ in node.next_functions)
    line = [-1 if d == dim else 1 for d in range(len(result))]
    numbers = torch.arange(result[dim], device="cpu").view(line).expand(result)
    parts = node(numbers)
    part = parts[step.position] if isinstance(parts, tuple) else parts
    return picked(places, [dim], dim, part.movedim(dim, 0).reshape(given[dim], -1)[:, 0])


def _handed_on(step: NodeStep, places: Places) -> Places:
    """Each result is the input of the same number."""
    return places if step.position == step.number else Places.nowhere(step.given)


def from_pieces(node: Any, results: Sequence[Places | None], shapes: Sequence[Shape]) -> Places:
    """For a split or ``unbind``: the results are all pieces of the input along a dimension.

    Args:
        node: The node of ``unbind`` or of a split.
        results: The places of each result, some of which have a cotangent.
        shapes: The shapes of all results, and then of the input.
    """
    given = shapes[-1]
    dim = signed(node._saved_dim) % len(given)
    if kind_of_node(type(node)).operation == "Unbind":
        results = [None if places is None else places.inserted(dim) for places in results]
        shapes = [(*shape[:dim], 1, *shape[dim:]) for shape in shapes[:-1]]
    grids = [None if places is None else places.grid() for places in results]
    arrived = [grid for grid in grids if grid is not None]
    first = arrived[0]
    is_even = len(arrived) == len(grids) and first.shape[dim] == 1
    if is_even and all(x.shape == first.shape and torch.equal(x, first) for x in arrived):
        return Places.of(given, first)
    others = [grid.select(dim, 0).shape for grid in arrived if grid.shape[dim]]
    full = list(torch.broadcast_shapes(*others))
    parts = []
    for grid, shape in zip(grids, shapes, strict=False):
        full.insert(dim, shape[dim])
        parts.append(first.new_full(full, EMPTY) if grid is None else grid.expand(full))
        del full[dim]
    return Places.of(given, torch.cat(parts, dim))


def by_copies(step: NodeStep, places: Places) -> Places:
    """For a node that adds up copies of elements, in a way that it does not tell.

    The node is carried out on numbers: for each place, these are the number of added copies, the
    sum of their samples, and the sum of the samples' squares. The count times the sum of squares
    equals the square of the sum only if all samples are equal.
    """
    grid = places.grid()
    is_flip = kind_of_node(type(step.node)).operation in ("Flip", "Roll")
    if is_flip and step.dims() and not any(map(places.varies, step.dims())):
        return places
    is_one = places.samples.numel() == 1 and not step.is_exact
    if is_one or int(grid.max()) >= _MOST_IN_COPIES:
        return all_together(step, places)
    step.is_hidden = kind_of_node(type(step.node)).operation == "AsStrided"  # input strides
    for name in ("mask", "index", "indices", "result1"):  # these decide, besides shapes
        if step.has(name):
            step.saved(name)
    grid = grid.expand(step.result)
    ones = (grid != EMPTY).double()
    powers = [step.node(x) for x in (ones, ones * grid, ones * grid * grid)]
    counts, sums, squares = (x[step.position] if isinstance(x, tuple) else x for x in powers)
    are_equal = (counts * squares == sums * sums) & (counts * squares < 2.0**53)
    samples = (sums / counts.clamp(min=1)).long().masked_fill(~are_equal, SEVERAL)
    places = Places.of(counts.shape, samples.masked_fill(counts == 0, EMPTY))
    return places.summed(step.given).compact(is_exact=step.is_exact)


def written(step: NodeStep, places: Places) -> Places:
    """For a tensor with overwritten places, which have no cotangent."""
    return (by_copies if step.is_exact else by_element)(step, places)


PIECES = ("Unbind", "Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes")
"""The operations whose results are pieces of one input: see :func:`from_pieces`."""

OF_VIEWS = table(
    (_permuted, "Transpose T Permute"),
    (_viewed, " ".join([*VIEWS, "Squeeze"])),
    (_unsqueezed, "Unsqueeze"),
    (_complex_view, "ViewAsReal ViewAsComplex"),
    (_from_slice, "Slice Select"),
    (_to_slice, "SliceBackward SelectBackward"),
    (by_input(written, _to_slice), "SliceScatter SelectScatter"),
    (_padded, "ConstantPadNd"),
    (_joined, "Cat Stack"),
    (by_input(written, by_copies), "DiagonalScatter MaskedScatter"),
    (by_input(written, by_element), "CopyBackwards Fill Zero"),
    (by_input(written), "IndexFill"),
    (_handed_on, "HandOn"),
    (
        by_copies,
        """
        AsStrided ChannelShuffle DiagEmbed Diagonal DiagonalBackward Flip PackPaddedSequence
        PixelShuffle PixelUnshuffle Repeat Roll Rot90 Trace Unfold
        """,
    ),
)
