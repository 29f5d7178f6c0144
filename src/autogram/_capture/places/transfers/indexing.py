"""Places behind indices, masks, sorts and look-ups, whose values decide."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from autogram._capture.places.places import Places, Shape, plain
from autogram._capture.places.transfers.moved import picked, pulled, scattered
from autogram._capture.places.transfers.step import (
    NodeStep,
    Transfer,
    all_together,
    by_input,
    reduced,
    table,
    unchanged,
)
from autogram._capture.places.transfers.views import written

_MASKS = (torch.bool, torch.uint8)


class _Indexed(NamedTuple):
    """How ``x[indices]`` reads positions."""

    dims: list[int]
    """The indexed dimensions of x."""
    start: int
    """The first dimension of the positions in the result."""
    rank: int
    """The number of such dimensions."""
    positions: Callable[[], Tensor]
    """Gives the numbers of the positions, along ``dims`` together."""


def _indexed(step: NodeStep, shape: Shape) -> _Indexed:
    """How the node's indices read an x of some shape."""
    dims: list[int] = []
    parts: list[Tensor] = []
    dim = 0
    for index in step.saved("indices"):
        if index is None:
            dim += 1
            continue
        is_mask = index.dtype in _MASKS
        rank = index.dim() if is_mask else 1
        dims += range(dim, dim + rank)
        parts += index.nonzero(as_tuple=True) if is_mask else [index]
        dim += rank
    are_adjacent = dims == list(range(dims[0], dims[-1] + 1))
    sizes = [shape[d] for d in dims]

    def positions() -> Tensor:
        return torch.arange(prod(sizes), device="cpu").view(sizes)[tuple(parts)]

    count = max(part.dim() for part in parts)
    return _Indexed(dims, dims[0] if are_adjacent else 0, count, positions)


def _from_indices(step: NodeStep, places: Places) -> Places:
    """The result is ``x[indices]``."""
    dims, start, rank, positions = _indexed(step, step.given)
    step.has_read = step.is_exact or any(map(places.varies, range(start, start + rank)))
    is_exact = step.is_exact
    return pulled(places, dims, start, rank, step.given, positions, is_exact=is_exact)


def _to_indices(step: NodeStep, places: Places) -> Places:
    """The input is the ``y`` of ``x[indices] = y``."""
    dims, start, _, positions = _indexed(step, step.result)
    step.has_read = any(map(places.varies, dims))
    return picked(places, dims, start, positions()).summed(step.given)


def _index(step: NodeStep, size: int, name: str = "index") -> Tensor:
    """The numbers of positions along a dimension of some size."""
    index = step.saved(name).long()
    return torch.where(index < 0, index + size, index)


def _from_index(step: NodeStep, places: Places) -> Places:
    """The result is that of ``index_select``."""
    if not step.given:
        return all_together(step, places)
    dim, size, is_exact = step.dim(), step.given[step.dim()], step.is_exact

    def positions() -> Tensor:
        return _index(step, size).view(-1)

    return pulled(places, [dim], dim, 1, step.given, positions, is_exact=is_exact)


def _to_index(step: NodeStep, places: Places) -> Places:
    """The input is added or copied to positions along a dimension."""
    if not step.given or len(step.given) != len(step.result):
        return all_together(step, places)
    dim = step.dim()
    if not places.varies(dim):
        return places.without(dim).inserted(dim, step.given[dim])
    return picked(places, [dim], dim, _index(step, step.result[dim]).view(-1))


def _from_rows(step: NodeStep, places: Places) -> Places:
    """The result is rows of a matrix, selected by indices of any shape, as in a table look-up."""
    count = len(step.result) - len(step.given) + 1
    flat = places.viewed((prod(step.result[:count]), *step.result[count:]))
    step.has_read = step.is_exact or flat.varies(0)

    def positions() -> Tensor:
        return _index(step, step.given[0], "indices").flatten()

    return pulled(flat, [0], 0, 1, step.given, positions, is_exact=step.is_exact)


def _filled(places: Places, given: Shape) -> Places:
    """Places cut or filled up to the sizes of an input; the first positions are the same."""
    for dim, (now, size) in enumerate(zip(places.shape, given, strict=True)):
        if now != size:
            is_along = places.varies(dim)
            places = places.padded(dim, 0, size - now) if is_along else places.resized(dim, size)
    return places


def _gathered(name: str) -> Transfer:
    """The result is single elements taken along a dimension by an index, as in a sort."""

    def transfer(step: NodeStep, places: Places) -> Places:
        given = step.given
        if not given or len(given) != len(step.result):
            return all_together(step, places)
        dim, samples = step.dim(), places.grid()
        if places.varies(dim) or step.is_exact:
            index = _index(step, given[dim], name)
            for other in range(index.dim()):  # positions on which the index does not depend
                if other != dim and samples.shape[other] == 1:
                    one = index.narrow(other, 0, 1) if index.shape[other] > 1 else index
                    index = one if bool((index == one).all()) else index
            sizes = [max(own) for own in zip(index.shape, samples.shape, strict=True)]
            sizes[dim] = index.shape[dim]
            samples = scattered(samples.expand(sizes), index.expand(sizes), dim, given[dim])
        shape = [size if d != dim else given[dim] for d, size in enumerate(step.result)]
        return _filled(Places(plain(shape), samples, True), given)

    return transfer


def _scattered(step: NodeStep, places: Places) -> Places:
    """The input is single elements put along a dimension by an index."""
    given, result = step.given, step.result
    if not given or len(given) != len(result):
        return all_together(step, places)
    dim = step.dim()
    if not places.varies(dim):
        return _filled(places, given)
    samples, index = places.grid(), _index(step, result[dim])
    sizes = [
        result[d] if d == dim or samples.shape[d] != 1 else size
        for d, size in enumerate(index.shape)
    ]
    taken = samples.expand(sizes).gather(dim, index)
    return _filled(Places(plain(index.shape), taken, places.may_be_empty), given)


def _selected(step: NodeStep, places: Places) -> Places:
    """Reductions that take one of all positions along a dimension."""
    if not step.is_exact or not step.given or not step.has("indices"):
        return reduced(step, places)
    dim, index = step.dim(), step.saved("indices").long()
    if len(step.result) < len(step.given):
        places, index = places.inserted(dim), index.unsqueeze(dim)
    samples = scattered(places.grid().expand(index.shape), index, dim, step.given[dim])
    return Places(plain(step.given), samples, True)


def _from_elements(step: NodeStep, places: Places) -> Places:
    """The result is elements taken from the whole tensor, by a mask or by number."""
    given, size = step.given, prod(step.given)
    flat = places.viewed((prod(step.result),))
    has_read = step.is_exact or flat.varies(0)

    def positions() -> Tensor:
        if not step.has("mask"):
            return _index(step, size).flatten()
        mask = step.saved("mask")
        shape = torch.broadcast_shapes(mask.shape, given)
        numbers = torch.arange(size, device="cpu").view(given).expand(shape)
        return numbers[mask.expand(shape)]

    places_of_input = pulled(flat, [0], 0, 1, (size,), positions, is_exact=step.is_exact).viewed(
        given
    )
    step.has_read = has_read
    return places_of_input


OF_INDICES = table(
    (_from_indices, "Index"),
    (by_input(written, _to_indices), "IndexPut IndexPutImpl"),
    (_from_index, "IndexSelect"),
    (by_input(unchanged, _to_index), "IndexAdd IndexReduce"),
    (by_input(written, _to_index), "IndexCopy"),
    (_from_rows, "Embedding"),
    (_gathered("index"), "Gather"),
    (_gathered("indices"), "Sort Topk Cummax Cummin"),
    (by_input(unchanged, _scattered), "ScatterAdd ScatterReduce"),
    (by_input(written, _scattered), "Scatter"),
    (_selected, "Max Min Median Nanmedian Kthvalue Mode"),
    (_from_elements, "Take MaskedSelect"),
)
