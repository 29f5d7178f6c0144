"""Slices: the dimensions of a tensor that a slice or a view keeps, where nodes do not tell.

If a slice of a tensor is changed in place, autograd puts a node ``CopySlices`` behind the whole
tensor. The node tells neither the slice nor the call that changed it; a recording therefore notes
both at the node. The node of a view by ``as_strided`` does not tell the strides of its base.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._blocks import Region

CHANGE = "CopySlices"
"""The operation of nodes behind tensors with a slice that was changed in place."""

_KEY = "autogram: the slice that was changed"  # key in the dict that a node keeps for its users


class ChangedSlice(NamedTuple):
    """The slice of a tensor that an element-wise call changed in place."""

    whole: Region
    part: Region


def note_change(node: Any, whole: Tensor, part: Tensor) -> None:
    """Notes at the node behind a tensor that an element-wise call changed a slice of it."""
    node.metadata[_KEY] = ChangedSlice(Region.of(whole), Region.of(part))


def changed_slice(node: Any) -> ChangedSlice | None:
    """The slice changed at such a node, if a recording has noted it."""
    found: ChangedSlice | None = node.metadata.get(_KEY)
    return found


@lru_cache(maxsize=4096)
def kept_by_slice(found: ChangedSlice) -> tuple[int, ...]:
    """For each dimension of the tensor, the dimension of a slice that keeps it whole, or -1.

    Empty if nothing is known of the slice.
    """
    whole, part = found
    if part.offset < whole.offset:
        return ()
    theirs, ours = _digits(whole), _digits(part, part.offset - whole.offset)
    kept = {way: dim for dim, way in ours.items()}
    return tuple([kept.get(theirs.get(dim, (0, 0)), -1) for dim in range(len(whole.shape))])


def kept_dims(node: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of a dimension of a view by ``as_strided`` and a dimension of the viewed tensor.

    An element of index i along the one has index i along the other, or one of the indices from ki
    to ki + k - 1, whatever its other indices are.

    A view whose base was changed in place also has such a node. The node has no attribute for
    the strides of its base, and equal graphs may differ in them. The gradient that the node
    returns has these strides, and costs nothing on a device without memory.
    """
    view = Region(0, node._saved_size, node._saved_stride)
    viewed = node(torch.empty(view.shape, device="meta"))
    # From the first to the last element of both tensors. Their offsets are unknown.
    places = viewed.untyped_storage().nbytes() // viewed.element_size()
    ours, theirs = (_digits(of, slack=places - of.places) for of in (view, Region.of(viewed)))
    return tuple(
        [
            (dim, other)
            for dim, (stride, period) in ours.items()
            for other, (step, same) in theirs.items()
            if period == same and stride % step == 0
        ]
    )


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether an operation, by PyTorch's tags, computes elements from those in the same place."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, x) for x in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _digits(of: Region, start: int = 0, slack: int = 0) -> dict[int, tuple[int, int]]:
    """The dimensions whose index is a digit of each element's position.

    The digit is ``position % period // stride``; returns stride and period of each dimension. The
    first element's position is ``start``, or at most ``slack`` after it.
    """
    dims = zip(of.shape, of.strides, strict=True)
    ways = [(d, n, step) for d, (n, step) in enumerate(dims) if n > 1 and step]
    found = {}
    for dim, size, stride in ways:
        period = size * stride
        inner = [(n - 1) * x for d, n, x in ways if d != dim and x % period]
        if start % period + slack + sum(inner) < stride:
            found[dim] = stride, period
    return found
