"""Where the B samples lie in a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    """Which sample each place along one dimension of a use's output belongs to."""

    @property
    def dim(self) -> int:
        """The dimension."""
        ...

    @property
    def batch(self) -> int:
        """B."""
        ...

    @property
    def has_before(self) -> bool:
        """Whether :meth:`split` gives a dimension before that of the samples."""
        ...

    @property
    def has_after(self) -> bool:
        """Whether :meth:`split` gives a dimension behind that of the samples."""
        ...

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """``tensor`` with dimension ``dim`` unfolded to ``(before, batch, after)``."""
        ...

    def owners(self, like: Tensor) -> Tensor:
        """The sample that each place belongs to, of a shape that broadcasts to that of ``like``."""
        ...


@dataclass(frozen=True)
class Folded:
    """Samples in regular places: a dimension read as ``(before, batch, after)``.

    ``before == after == 1`` is the plain case: the whole dimension counts the samples. Windows or
    tokens folded behind the sample (``view(-1, d)``) give ``after > 1``; sequence-major folding
    (the output projection of attention) gives ``before > 1``.
    """

    dim: int
    before: int
    batch: int
    after: int

    @cached_property
    def has_before(self) -> bool:
        """Whether something is folded before the samples."""
        return self.before > 1

    @cached_property
    def has_after(self) -> bool:
        """Whether something is folded behind the samples."""
        return self.after > 1

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """``tensor`` with dimension ``dim`` unfolded, as a view; dimensions of one are left out."""
        sizes = [self.before] * self.has_before + [self.batch] + [self.after] * self.has_after
        return tensor.unflatten(dim, sizes) if len(sizes) > 1 else tensor

    def owners(self, like: Tensor) -> Tensor:
        """The sample that each place belongs to, of a shape that broadcasts to that of ``like``."""
        size = self.before * self.batch * self.after
        along = torch.arange(size, device=like.device) // self.after % self.batch
        return along.view(-1, *(1,) * (like.dim() - self.dim - 1))

    def __str__(self) -> str:
        sizes = [("", self.before), ("samples ", self.batch), ("", self.after)]
        folded = " x ".join(f"{word}{size}" for word, size in sizes if size > 1 or word)
        return f"dimension {self.dim} ({folded})"


@dataclass(frozen=True, eq=False)
class Routed:
    """Samples in any places: tokens gathered for an expert, packed sequences, a permutation."""

    dim: int
    batch: int
    samples: Tensor
    """The sample of each place along the dimension, -1 for none. On the CPU."""

    has_before = False
    has_after = True

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """A copy with the places gathered by sample, and zeros where a sample has fewer of them."""
        places = self._places.to(tensor.device)
        found = tensor.index_select(dim, places.flatten().clamp(min=0))
        is_place = (places >= 0).view(
            *places.shape, *(1,) * (tensor.dim() - dim % tensor.dim() - 1)
        )
        return torch.where(is_place, found.unflatten(dim, places.shape), 0)

    def owners(self, like: Tensor) -> Tensor:
        """The sample that each place belongs to, of a shape that broadcasts to that of ``like``."""
        return self.samples.to(like.device).view(-1, *(1,) * (like.dim() - self.dim - 1))

    @cached_property
    def _places(self) -> Tensor:
        """The places of each sample, ``(batch, most of one sample)``, filled up with -1."""
        order = self.samples.argsort(stable=True)
        owners = self.samples[order]
        order, owners = order[owners >= 0], owners[owners >= 0]
        counts = torch.bincount(owners, minlength=self.batch)
        ranks = torch.arange(len(order), device="cpu") - (counts.cumsum(0) - counts)[owners]
        places = torch.full((self.batch, int(counts.max())), -1, device="cpu")
        places[owners, ranks] = order
        return places

    def __str__(self) -> str:
        return f"dimension {self.dim} ({len(self.samples)} places of {self.batch} samples, routed)"


def agree(layouts: Sequence[Layout], places: Tensor) -> bool:
    """Whether some layouts give the same sample to each of the marked places of a tensor."""
    first, *others = (layout.owners(places) for layout in layouts)
    is_without = bool((places & (first < 0)).any())
    return not is_without and not any(bool((places & (first != x)).any()) for x in others)


def candidates(shape: tuple[int, ...], dims: tuple[int, ...], batch: int) -> list[Folded]:
    """Every regular layout of ``batch`` samples in some dimensions, the likely ones first."""
    return [
        Folded(dim, before, batch, size // batch // before)
        for dim in dims
        for size in (shape[dim],)
        if size and size % batch == 0
        for before in range(1, size // batch + 1)
        if size // batch % before == 0
    ]
