"""Strides: which dimensions of a view by ``as_strided`` are dimensions of the viewed tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def kept_dims(node: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of a dimension of a view by ``as_strided`` and a dimension of the viewed tensor.

    An element of index i along the one is an element of index i, or of one of the indices from ki
    to ki + k - 1, along the other, whatever its other indices are.

    A view has such a node, too, if what it is a view of was changed in place. No attribute of the
    node tells the strides of the viewed tensor, and equal graphs may differ in them. The gradient
    that the node returns has these strides, and costs nothing on a device without memory.
    """
    sizes, strides = node._saved_size, node._saved_stride
    viewed = node(torch.empty(sizes, device="meta"))
    # From the first element of both tensors to the last one. The offsets themselves are not known.
    reach = viewed.untyped_storage().nbytes() // viewed.element_size() - 1
    steps = viewed.stride()
    ours = digits(sizes, strides, slack=reach - _span(sizes, strides))
    theirs = digits(viewed.shape, steps, slack=reach - _span(viewed.shape, steps))
    return tuple(
        [
            (dim, other)
            for dim, (stride, period) in ours.items()
            for other, (step, same) in theirs.items()
            if period == same and stride % step == 0
        ]
    )


def digits(
    sizes: Sequence[int], strides: Sequence[int], start: int = 0, slack: int = 0
) -> dict[int, tuple[int, int]]:
    """The dimensions whose index is a digit of each element's position.

    That is, ``position % period // stride``. For each of them, stride and period. The first
    element's position is ``start``, or at most ``slack`` behind it.
    """
    dims = zip(sizes, strides, strict=True)
    ways = [(d, n, step) for d, (n, step) in enumerate(dims) if n > 1 and step]
    found = {}
    for dim, size, stride in ways:
        period = size * stride
        inner = [(n - 1) * x for d, n, x in ways if d != dim and x % period]
        if start % period + slack + sum(inner) < stride:
            found[dim] = stride, period
    return found


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How far the last element of a tensor is from its first."""
    return sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
