"""Regions: the elements of a parameter that a view covers, and tensors on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """The elements of a parameter that a view addresses, in the units of its storage.

    Dimensions of size one and expanded dimensions (stride zero) address nothing new. The others,
    by descending stride, are the *canonical* order: a weight and its transpose agree on it.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @cached_property
    def numbers(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """All of the region, for keys: a tuple is compared without a call of Python."""
        return self.offset, self.shape, self.strides

    @classmethod
    def of(cls, tensor: Tensor, shift: int = 0) -> Region:
        """The elements of its storage that ``tensor`` addresses, moved by ``shift``."""
        place = int(tensor.storage_offset()) + shift, tuple(tensor.shape), tensor.stride()
        try:
            return _known(*place)
        except TypeError:  # where a graph is compiled for open sizes, these have no hash
            return Region(*place)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...]) -> Region:
        """All elements of a contiguous tensor."""
        return cls.of(torch.empty(shape, device="meta"))

    @classmethod
    def of_parameter(cls, parameter: Tensor) -> Region:
        """All elements of a parameter, a complex one with a last dimension of two.

        Elements of an expanded parameter share their memory. They are independent for autograd, and
        therefore here.
        """
        region = cls.of(as_real(parameter))
        return region if region.is_whole else cls.contiguous(region.shape)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dimensions that matter, in canonical order."""
        dims = [d for d, n in enumerate(self.shape) if n > 1 and self.strides[d] > 0]
        return tuple(sorted(dims, key=lambda d: -self.strides[d]))

    @cached_property
    def canonical(self) -> Region:
        """The same elements, with the dimensions that matter in canonical order."""
        return Region(
            self.offset,
            tuple(self.shape[d] for d in self.order),
            tuple(self.strides[d] for d in self.order),
        )

    def indices(self) -> Tensor:
        """Places in the storage of the elements, in canonical order, flattened."""
        index = torch.tensor(self.offset, device="cpu")
        for d in self.order:
            places = torch.arange(self.shape[d], device="cpu") * self.strides[d]
            index = index.unsqueeze(-1) + places
        return index.flatten()

    def shifted(self, offset: int) -> Region:
        """A region that begins further on."""
        return replace(self, offset=self.offset + offset) if offset else self

    def split_first(self, groups: int) -> Region:
        """The same elements, with the first dimension split into ``(groups, rest)``."""
        (size, *shape), (stride, *strides) = self.shape, self.strides
        rest = size // groups
        return Region(self.offset, (groups, rest, *shape), (rest * stride, stride, *strides))

    @cached_property
    def is_injective(self) -> bool:
        """Whether no element is addressed twice, except by expanded dimensions."""
        span = 1
        for d in reversed(self.order):
            if self.strides[d] < span:
                return False
            span = (self.shape[d] - 1) * self.strides[d] + span
        return True

    @cached_property
    def is_whole(self) -> bool:
        """Whether each element has its own place, even in expanded dimensions."""
        return self.is_injective and all(self.strides)

    @cached_property
    def is_gapless(self) -> bool:
        """Whether no place between the first and the last is left out."""
        return prod(self.shape) == self.places

    @property
    def places(self) -> int:
        """The number of places from the first to the last."""
        first, last = self.bounds
        return last - first + 1

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The first and the last place in the storage."""
        return self.offset, self.offset + sum(
            (self.shape[d] - 1) * self.strides[d] for d in self.order
        )


# One object for equal regions, so that derived values are computed once.
_known = lru_cache(maxsize=4096)(Region)


@lru_cache(maxsize=4096)
def overlap(first: Region, second: Region) -> bool:
    (start, end), (other_start, other_end) = first.bounds, second.bounds
    if end < other_start or other_end < start:
        return False
    return bool(torch.isin(first.indices(), second.indices()).any())


def as_real(tensor: Tensor) -> Tensor:
    """A tensor with a last dimension for the real and the imaginary part, if it is complex."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def in_numbers_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A real tensor as one of complex numbers, if those of a parameter are complex."""
    return torch.view_as_complex(tensor.contiguous()) if parameter.is_complex() else tensor


def put(parts: Sequence[tuple[Region, Tensor]], parameter: Region) -> Tensor:
    """Adds up tensors ``(n, *canonical region)`` on regions of a parameter, in storage order.

    The result is ``(n, places)``, from the first to the last place of the parameter. The result
    may share its memory with the only part.
    """
    first, places = parameter.offset, parameter.places
    region, part = parts[0]
    n = len(part)
    if len(parts) == 1 and region.bounds == parameter.bounds and region.is_gapless:
        return part.reshape(n, places)
    flat = part.new_zeros(n, places)
    for region, part in parts:
        strides = (places, *region.canonical.strides)
        flat.as_strided((n, *region.canonical.shape), strides, region.offset - first).add_(part)
    return flat


def from_storage(flat: Tensor, parameter: Region) -> Tensor:
    """Tensors with a parameter's shape and strides, ``(n, *parameter)``, from its storage."""
    n, places = flat.shape
    return flat.contiguous().as_strided((n, *parameter.shape), (places, *parameter.strides))


def take(tensor: Tensor, region: Region, parameter: Region) -> Tensor:
    """The elements of a region, in canonical order, of a tensor of a parameter's shape."""
    like_parameter = tensor.new_empty_strided(parameter.shape, parameter.strides).copy_(tensor)
    found = region.canonical
    return like_parameter.as_strided(found.shape, found.strides, found.offset - parameter.offset)
