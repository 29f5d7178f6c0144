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
    if found is None or not _is_dense(found.whole):
        return ()
    whole = found.whole
    dims = zip(whole.sizes, whole.strides, strict=True)
    return tuple([_kept(found, size, stride) for size, stride in dims])


def _kept(found: ChangedSlice, size: int, stride: int) -> int:
    """The dimension of a slice that runs through one of the tensor's, and no other one does.

    Of an address in a dense tensor, ``address // stride % size`` is the index along a dimension.
    So further dimensions of the slice must go by multiples of ``stride * size``, or not as far as
    ``stride`` all together.
    """
    part, start = found.part, found.part.offset - found.whole.offset
    dims = [(n, by, d) for d, (n, by) in enumerate(zip(part.sizes, part.strides, strict=True))]
    own = [d for n, by, d in dims if (n, by) == (size, stride)]
    if size < 2 or len(own) != 1 or start < 0 or start // stride % size:
        return -1
    others = [(n, by) for n, by, d in dims if d != own[0] and n > 1]
    inner = [(n - 1) * by for n, by in others if 0 <= by < stride]
    is_outer = [by % (stride * size) == 0 for _, by in others if not 0 <= by < stride]
    return own[0] if all(is_outer) and start % stride + sum(inner) < stride else -1


def _is_dense(geometry: Geometry) -> bool:
    """Whether the elements of a tensor lie side by side, each in a place of its own."""
    expected = 1
    for stride, size in sorted(zip(geometry.strides, geometry.sizes, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether an operation computes each element from those in its place, by PyTorch's tags."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, x) for x in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)
