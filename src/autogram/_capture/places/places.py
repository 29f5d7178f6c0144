"""Places: the sample to which each element of a cotangent belongs, whatever its value is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

EMPTY = -1
"""The sample of places whose cotangent is zero."""
SEVERAL = 2**62
"""The sample of places whose cotangent is a sum over several samples."""

Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Places:
    """The sample of each place of a tensor.

    Samples are integers, with one dimension for each *factor* of the tensor's dimensions: a
    tensor of shape ``(B * T, H * D)``, made from ``(B, T, H, D)``, has the factors
    ``((B, T), (H, D))``. Along a factor on which the sample does not depend, the integers have
    size 1. Views therefore move no integers, and samples along one dimension are only B integers,
    however large the tensor is. Samples folded with positions, class tokens, routed tokens and
    single elements all have this form.
    """

    factors: tuple[Shape, ...]
    """The factors of each dimension of the tensor."""
    samples: Tensor
    """The sample of each place, `EMPTY` or `SEVERAL`; int64, on the CPU."""
    may_be_empty: bool = False
    """Whether some places may be `EMPTY`."""
    is_compact: bool = False
    """Whether :meth:`compact` would change nothing."""

    @classmethod
    def of(cls, shape: Sequence[int], samples: Tensor) -> Places:
        """Places from samples whose shape broadcasts to the shape of the tensor."""
        samples = samples[(None,) * (len(shape) - samples.dim())]
        return cls(plain(shape), samples, True)

    @classmethod
    def along(cls, shape: Sequence[int], dim: int) -> Places:
        """Samples along one dimension."""
        line = [-1 if d == dim else 1 for d in range(len(shape))]
        return cls(plain(shape), torch.arange(shape[dim], device="cpu").view(line), False, True)

    @classmethod
    def nowhere(cls, shape: Sequence[int]) -> Places:
        """Places of a tensor without a cotangent."""
        empty = torch.full((1,) * len(shape), EMPTY, device="cpu")
        return cls(plain(shape), empty, True, True)

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple([prod(of_dim) for of_dim in self.factors])

    @property
    def is_mixed(self) -> bool:
        """Whether samples meet in some place."""
        return bool((self.samples == SEVERAL).any())

    @property
    def is_empty(self) -> bool:
        """Whether the whole cotangent is zero."""
        return self.may_be_empty and bool((self.samples == EMPTY).all())

    def axes(self, dim: int) -> range:
        """The axes of the samples that are factors of a dimension."""
        start = sum(map(len, self.factors[:dim]))
        return range(start, start + len(self.factors[dim]))

    def varies(self, dim: int) -> bool:
        """Whether the sample depends on the position along a dimension."""
        return any(self.samples.shape[axis] != 1 for axis in self.axes(dim))

    # Dimensions that change

    def permuted(self, order: Sequence[int]) -> Places:
        """Places with the dimensions in another order."""
        axes = [axis for dim in order for axis in self.axes(dim)]
        return self._with([self.factors[dim] for dim in order], self.samples.permute(axes))

    def inserted(self, dim: int, size: int = 1) -> Places:
        """Places with an additional dimension, along which the sample stays the same."""
        axis = sum(map(len, self.factors[:dim]))
        factors = (*self.factors[:dim], (size,), *self.factors[dim:])
        return self._with(factors, self.samples.unsqueeze(axis))

    def merged(self, dims: Iterable[int]) -> Places:
        """Places where each one depends on all positions along some dimensions."""
        shape, axes = self.samples.shape, [axis for dim in dims for axis in self.axes(dim)]
        axes = [axis for axis in axes if shape[axis] != 1]
        return self._with(self.factors, unanimous(self.samples, axes)) if axes else self

    def without(self, dim: int) -> Places:
        """Places with all positions along a dimension added up."""
        merged, axes = self.merged([dim]), self.axes(dim)
        shape = merged.samples.shape
        samples = merged.samples.reshape((*shape[: axes.start], *shape[axes.stop :]))
        return self._with((*self.factors[:dim], *self.factors[dim + 1 :]), samples)

    def resized(self, dim: int, size: int) -> Places:
        """Places with a dimension of another size, where each one depends on all old positions."""
        if prod(self.factors[dim]) == size:
            return self
        return self.without(dim).inserted(dim, size)

    def fitted(self, shape: Shape) -> Places:
        """Places with the sizes of a shape of equally many dimensions; see :meth:`resized`."""
        places = self
        for dim, size in enumerate(shape):
            places = places.resized(dim, size)
        return places

    def summed(self, shape: Shape) -> Places:
        """Places added up to a shape that was broadcast to the tensor's shape."""
        places = self
        for _ in range(len(self.factors) - len(shape)):
            places = places.without(0)
        for _ in range(len(shape) - len(places.factors)):
            places = places.inserted(0)
        return places.fitted(shape)

    def viewed(self, shape: Shape) -> Places:
        """Places of the same elements, in order, in another shape.

        It splits or joins factors of the old shape where a new dimension ends inside them.
        """
        if not prod(shape):
            return Places.nowhere(shape)
        old, samples, axis = [n for of_dim in self.factors for n in of_dim], self.samples, 0
        factors: list[Shape] = []
        sizes: list[int] = []  # of the samples, along the new factors
        for rest in shape:
            of_dim: list[int] = []
            while rest != 1:
                size = old[axis]
                if size == 1:
                    samples = samples.squeeze(axis)
                    del old[axis]
                    continue
                if rest % size and size % rest:  # neither divides the other
                    following = old.pop(axis + 1)
                    if samples.shape[axis] != 1 or samples.shape[axis + 1] != 1:
                        full = list(samples.shape)
                        full[axis : axis + 2] = size, following
                        samples = samples.expand(full)
                    samples, old[axis] = samples.flatten(axis, axis + 1), size * following
                    continue
                if rest % size:  # the factor goes on in the next dimension
                    is_one = samples.shape[axis] == 1
                    parts = (1, 1) if is_one else (rest, size // rest)
                    samples = samples.unflatten(axis, parts)
                    old[axis : axis + 1] = rest, size // rest
                    size = rest
                of_dim.append(size)
                sizes.append(samples.shape[axis])
                rest, axis = rest // size, axis + 1
            if not of_dim:
                sizes.append(1)
            factors.append(tuple(of_dim) or (1,))
        return self._with(factors, samples.reshape(sizes))

    def padded(self, dim: int, before: int, after: int) -> Places:
        """Places with empty positions added at the ends of a dimension, or positions cut off."""
        grid, size = self.grid(), prod(self.factors[dim])
        if grid.shape[dim] == 1 != size:
            grid = grid.expand([size if d == dim else -1 for d in range(grid.dim())])
        inner = [0, 0] * (grid.dim() - 1 - dim)
        grid = pad(grid, [*inner, before, after], value=EMPTY)
        sizes = [prod(of_dim) for of_dim in self.factors]
        sizes[dim] = grid.shape[dim]
        return Places.of(sizes, grid)

    # Samples that meet

    def joined(self, other: Places) -> Places:
        """The places of a sum of two tensors."""
        if other is self:
            return self
        one, two, factors = self.samples, other.samples, self.factors
        if factors != other.factors:
            one, two, factors = self.grid(), other.grid(), plain(self.shape)
        if one.shape == two.shape and torch.equal(one, two):
            return self
        differ = (one != two) & (one != EMPTY) & (two != EMPTY)
        samples = torch.maximum(one, two).masked_fill(differ, SEVERAL)
        return Places(factors, samples, self.may_be_empty and other.may_be_empty)

    def emptied(self, is_zero: Tensor) -> Places:
        """Places without those where a mask, which broadcasts to the shape, is true."""
        grid = self.grid()
        is_zero = is_zero[(None,) * (grid.dim() - is_zero.dim())]
        return Places(plain(self.shape), torch.where(is_zero, EMPTY, grid), True)

    def compact(self, *, is_exact: bool) -> Places:
        """Places with size 1 along each axis along which all samples are equal.

        Unless it ``is_exact``, empty places belong to any sample, because zero is zero for all.
        One axis keeps its empty places even so: another tensor may have samples there.
        """
        samples = self.samples
        if self.is_compact or not samples.numel():
            return self
        for axis in reversed(range(samples.dim())):
            if samples.shape[axis] == 1:
                continue
            largest = samples.amax(axis, keepdim=True)
            is_equal = samples == largest
            if self.may_be_empty and not is_exact and samples.numel() > samples.shape[axis]:
                is_equal |= samples == EMPTY
            if bool(is_equal.all()):
                samples = largest
        places = self if samples is self.samples else self._with(self.factors, samples)
        places.is_compact = True
        return places

    def grid(self) -> Tensor:
        """The samples with one axis for each dimension, of size 1 where they are equal along it."""
        samples = self.samples
        for dim, of_dim in enumerate(self.factors):
            if len(of_dim) > 1:
                sizes = samples.shape[dim : dim + len(of_dim)]
                if any(size != 1 for size in sizes):
                    full = *samples.shape[:dim], *of_dim, *samples.shape[dim + len(of_dim) :]
                    samples = samples.expand(full)
                samples = samples.flatten(dim, dim + len(of_dim) - 1)
        return samples

    def _with(self, factors: Iterable[Shape], samples: Tensor) -> Places:
        return Places(tuple(factors), samples, self.may_be_empty)


def are_equal(one: Places | None, other: Places | None) -> bool:
    """Whether two tensors have the same samples in the same form, or both have no cotangent."""
    if one is None or other is None:
        return one is other
    same = one.factors == other.factors and one.samples.shape == other.samples.shape
    return same and torch.equal(one.samples, other.samples)


def plain(shape: Sequence[int]) -> tuple[Shape, ...]:
    """Each dimension as a single factor."""
    return tuple([(size,) for size in shape])


def unanimous(samples: Tensor, axes: Sequence[int]) -> Tensor:
    """The sample of all places along some axes together, which keep size 1."""
    if not samples.numel():
        return samples.new_full([1 if d in axes else n for d, n in enumerate(samples.shape)], EMPTY)
    largest = samples.amax(list(axes), keepdim=True)
    differ = (samples != EMPTY) & (samples != largest)
    return largest.masked_fill(differ.any(list(axes), keepdim=True), SEVERAL)
