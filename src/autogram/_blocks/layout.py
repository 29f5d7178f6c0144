"""Where the B samples lie in a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """One dimension of a use's output, read as ``(before, batch, after)``.

    ``before == after == 1`` is the plain case: the whole dimension counts the samples. Windows or
    tokens folded behind the sample (``view(-1, d)``) give ``after > 1``; sequence-major folding
    (the output projection of attention) gives ``before > 1``.
    """

    dim: int
    before: int
    batch: int
    after: int

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """``tensor`` with dimension ``dim`` unfolded to ``(before, batch, after)``, less ones."""
        sizes = [self.before] * (self.before > 1) + [self.batch] + [self.after] * (self.after > 1)
        return tensor.unflatten(dim, sizes) if len(sizes) > 1 else tensor

    def samples(self, like: Tensor) -> Tensor:
        """The sample that each place belongs to, of a shape that broadcasts to that of ``like``."""
        size = self.before * self.batch * self.after
        along = torch.arange(size, device=like.device) // self.after % self.batch
        return along.view(-1, *(1,) * (like.dim() - self.dim - 1))

    def __str__(self) -> str:
        sizes = [("", self.before), ("samples ", self.batch), ("", self.after)]
        folded = " x ".join(f"{word}{size}" for word, size in sizes if size > 1 or word)
        return f"dimension {self.dim} ({folded})"


def agree(layouts: Sequence[Layout], places: Tensor) -> bool:
    """Whether some layouts give the same sample to each of the marked places of a tensor."""
    first, *others = (layout.samples(places) for layout in layouts)
    return not any(bool((places & (first != other)).any()) for other in others)


def candidates(shape: tuple[int, ...], dims: tuple[int, ...], batch: int) -> list[Layout]:
    """Every layout of ``batch`` samples in some dimensions of a tensor, the likely ones first."""
    return [
        Layout(dim, before, batch, size // batch // before)
        for dim in dims
        for size in (shape[dim],)
        if size and size % batch == 0
        for before in range(1, size // batch + 1)
        if size // batch % before == 0
    ]
