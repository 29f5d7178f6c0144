"""Places that a node moves along dimensions, to positions that it tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from autogram._capture.places.places import EMPTY, SEVERAL, Places, Shape, plain


def pulled(
    places: Places,
    dims: Sequence[int],
    start: int,
    count: int,
    given: Shape,
    positions: Callable[[], Tensor],
    *,
    is_exact: bool = True,
) -> Places:
    """The places of an input, from those of a result that was taken from it.

    Unless it ``is_exact``, positions that were not taken belong to the same sample as all others,
    if there is only one, so that the positions need not be read.

    Args:
        places: The places of the result.
        dims: The dimensions of the input along which positions were taken.
        start: The first dimension of the result that holds these positions.
        count: The number of such dimensions of the result.
        given: The shape of the input.
        positions: Gives the numbers of the taken positions, along ``dims`` together, in the
            shape of the result's dimensions.
        is_exact: Whether to tell which positions were not taken.
    """
    grid = places.grid()
    inner = range(start, start + count)
    grid = grid.permute([*inner, *[d for d in range(grid.dim()) if d not in inner]])
    others = grid.shape[count:]
    if not is_exact and all(size == 1 for size in grid.shape[:count]):
        samples = grid.reshape((1,) * len(dims) + others)
    else:
        numbers = positions()
        sizes = [given[dim] for dim in dims]
        flat = grid.expand(*numbers.shape, *others).reshape(numbers.numel(), *others)
        numbers = numbers.reshape(-1, *(1,) * len(others)).expand_as(flat)
        samples = _votes(flat, numbers, 0, (prod(sizes), *others)).view(*sizes, *others)
    order = [*dims, *[d for d in range(len(given)) if d not in dims]]
    samples = samples.permute([order.index(d) for d in range(len(given))])
    return Places(plain(given), samples, True)


def picked(places: Places, dims: Sequence[int], start: int, positions: Tensor) -> Places:
    """The places of an input that was put into some positions of a result.

    Args:
        places: The places of the result.
        dims: The dimensions of the result along which positions were chosen.
        start: The first dimension of the input that holds these positions.
        positions: The numbers of the positions, along ``dims`` together, in the shape of the
            input's dimensions from ``start`` on. The input's other dimensions are the
            result's dimensions outside ``dims``.
    """
    grid, shape = places.grid(), places.shape
    rest = [d for d in range(grid.dim()) if d not in dims]
    sizes = [shape[d] for d in dims]
    grid = grid.permute([*dims, *rest])
    others = grid.shape[len(dims) :]
    if all(size == 1 for size in grid.shape[: len(dims)]):
        samples = grid.reshape((1,) * positions.dim() + others)
    else:
        samples = grid.expand(*sizes, *others).reshape(prod(sizes), *others)[positions.flatten()]
        samples = samples.reshape((*positions.shape, *others))
    count = positions.dim()
    if count:
        samples = samples.movedim(tuple(range(count)), tuple(range(start, start + count)))
    kept = [shape[d] for d in rest]
    given = (*kept[:start], *positions.shape, *kept[start:])
    return Places(plain(given), samples, places.may_be_empty)


def scattered(grid: Tensor, index: Tensor, dim: int, size: int) -> Tensor:
    """Samples added up at positions along a dimension, which then has a given size.

    The index has the shape of the samples.
    """
    shape = list(grid.shape)
    shape[dim] = size
    return _votes(grid, index, dim, shape)


def _votes(samples: Tensor, index: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """The sample of each position to which samples are added up; `SEVERAL` if they differ."""
    largest = samples.new_full(shape, EMPTY).scatter_reduce(dim, index, samples, "amax")
    least = torch.full_like(largest, SEVERAL)
    least.scatter_reduce_(dim, index, samples.masked_fill(samples == EMPTY, SEVERAL), "amin")
    return largest.masked_fill((largest != EMPTY) & (largest != least), SEVERAL)
