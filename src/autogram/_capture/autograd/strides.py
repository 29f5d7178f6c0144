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
    reach = viewed.untyped_storage().nbytes() // viewed.element_size()
    ours = _digits(sizes, strides, reach)
    theirs = _digits(viewed.shape, viewed.stride(), reach)
    return tuple(
        [
            (dim, other)
            for dim, (stride, period) in ours.items()
            for other, (step, same) in theirs.items()
            if period == same and stride % step == 0
        ]
    )


def _digits(sizes: Sequence[int], strides: Sequence[int], reach: int) -> dict[int, tuple[int, int]]:
    """The dimensions whose index is a digit of each element's position.

    That is, ``position % period // stride``. For each of them, stride and period.
    """
    ways = [(d, n, step) for d, (n, step) in enumerate(zip(sizes, strides, strict=True)) if n > 1]
    slack = reach - 1 - sum((n - 1) * step for _, n, step in ways)  # its offset is at most this
    found = {}
    for dim, size, stride in ways:
        period = size * stride
        inner = [(n - 1) * x for d, n, x in ways if d != dim and period and x % period]
        if slack + sum(inner) < stride:
            found[dim] = stride, period
    return found
