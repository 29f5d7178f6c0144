"""Slices: which dimensions of a tensor a slice of it keeps, for nodes that do not tell.

Where a slice of a tensor is changed in place, autograd puts a node ``CopySlices`` behind the whole
tensor, which tells neither which slice that is nor by what it was changed. So a recording notes it
at the node.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._capture.autograd.strides import digits

CHANGE = "CopySlices"
"""The operation of nodes behind tensors of which a slice was changed in place."""

_KEY = "autogram: the slice that was changed"  # in the dict that a node keeps for its users


class Geometry(NamedTuple):
    """Where the elements of a tensor lie in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """The geometry of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class ChangedSlice(NamedTuple):
    """The slice of a tensor that an element-wise call changed in place."""

    whole: Geometry
    part: Geometry

    @property
    def numbers(self) -> tuple[int, ...]:
        """All that the places of elements follow from."""
        of, part = self
        return *of.sizes, *of.strides, of.offset, *part.sizes, *part.strides, part.offset


def note_change(node: Any, whole: Tensor, part: Tensor) -> None:
    """Notes at the node behind a tensor that an element-wise call changed a slice of it."""
    node.metadata[_KEY] = ChangedSlice(Geometry.of(whole), Geometry.of(part))


def changed_slice(node: Any) -> ChangedSlice | None:
    """The slice that was changed at such a node, if a recording has noted it."""
    found: ChangedSlice | None = node.metadata.get(_KEY)
    return found


@lru_cache(maxsize=4096)
def kept_by_slice(found: ChangedSlice | None) -> tuple[int, ...]:
    """The dimension of a slice that has a whole dimension of the tensor, in order, or -1.

    One for each dimension of the tensor; none where nothing is known of a slice.
    """
    if found is None or found.part.offset < found.whole.offset:
        return ()
    whole, part = found
    theirs = digits(whole.sizes, whole.strides)
    kept = {
        way: d for d, way in digits(part.sizes, part.strides, part.offset - whole.offset).items()
    }
    return tuple([kept.get(theirs.get(dim, (0, 0)), -1) for dim in range(len(whole.sizes))])


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether an operation computes each element from those in its place, by PyTorch's tags."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, x) for x in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)
