"""Kernels for a CPU: pieces that fit into its caches, and reused memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autogram._blocks.kernels.base import Kernels, Limit
from autogram._blocks.kernels.contraction import repeats
from autogram._blocks.kernels.paths import Prices
from autogram._blocks.kernels.workspace import Purpose, Workspace
from autogram._blocks.programs.known import Programs
from autogram._blocks.programs.program import as_one_call

# Bytes of one piece of rows, or of a copy of a factor. Larger results are written piece by piece
# into the same memory: of the sizes from 8 to 128 MiB, the smallest that was as fast as the best.
_PIECE = 2**26

# Elements of copies that are multiplied, and of products that are summed, at once. With a quarter
# of these to twice as many, all took as long. With eight times as many, which no cache keeps, rows
# of depthwise convolutions took up to 1.8 times as long.
_SHORT_LIVED = 2**20

# With fewer samples on a side, products are too thin to gain from leaving out their mirror.
_FEWEST_SAMPLES = 16
_WORTH_MIRRORING = 2**28

# A matrix product with few rows and columns and a long sum keeps only one thread busy. Cut into
# parts of the sum, the product took three quarters of the time on two threads.
_WORTH_SPLITTING = 2**19
_PARTS = 4

# With more elements of patches than this for each element of the rows, the rows of a convolution
# took a fortieth to nine tenths of the time from its gradient, without patches. In float64,
# PyTorch has a kernel for one group, which it would call for each group of each sample.
_PATCHES_PER_ROW = 8


class CpuKernels(Kernels):
    """Contractions on a CPU."""

    tiny = 2**13

    def __init__(self, limit: Limit, programs: Programs | None = None) -> None:
        super().__init__(limit, programs)
        self.workspace = Workspace()

    def most_elements(self, dtype: torch.dtype) -> int:
        """The limit, or what fits in one piece."""
        return min(self.limit.elements, _PIECE // self.accumulating(dtype).itemsize)

    def prices(self, dtype: torch.dtype) -> Prices:
        return Prices(memory=16, mirror=_WORTH_MIRRORING, thin=_FEWEST_SAMPLES)

    def at_once(self, elements: int, like: Tensor) -> int:
        """The number that stays in a cache until it is read."""
        return min(elements, self.limit.elements, _SHORT_LIVED)

    def scratch(self, shape: Sequence[int], like: Tensor, purpose: Purpose = "rows") -> Tensor:
        """Memory of this thread, unless it would be larger than a piece."""
        if prod(shape) * like.dtype.itemsize > _PIECE:
            return like.new_empty(shape)
        # By a method of the workspace: a program that kept kernels would be kept by them.
        return as_one_call(self.workspace.scratch, shape, like, purpose)

    def arranged(
        self, tensor: Tensor, order: tuple[int, ...], shape: tuple[int, ...], purpose: Purpose
    ) -> Tensor:
        """Patches are copied before they are permuted: reading them in long runs is faster."""
        if not repeats(tensor):
            return super().arranged(tensor, order, shape, purpose)
        return self.copy(tensor, purpose).permute(order).reshape(shape)

    def parts(self, rows: Tensor) -> int:
        """One, or a few for long sums."""
        return 1 if rows.numel() < _WORTH_SPLITTING or rows.shape[1] % _PARTS else _PARTS

    def gram(self, rows: Tensor) -> Tensor:
        """Rows times themselves, where one of two mixed quarters mirrors the other."""
        m = rows.shape[0]
        if m < 2 * _FEWEST_SAMPLES or rows.numel() < _WORTH_SPLITTING:
            return self.multiply(rows, rows)
        half = m // 2
        left = self.multiply(rows, rows[:half])  # (m, half)
        last = self.multiply(rows[half:], rows[half:])
        return torch.cat([left, torch.cat([left[half:].mT, last])], 1)

    def prefers_adjoint(self, patches: int, rows: int, channels: int, *dtypes: torch.dtype) -> bool:
        """Whether there are many patches, and a kernel for many groups at once."""
        has_kernel = torch.backends.mkldnn.is_available()
        is_fast = has_kernel and self.multiplied(*dtypes) == torch.float32
        return is_fast and patches > _PATCHES_PER_ROW * rows

    def with_copy(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The operands with one copy of the largest, if it repeats elements, as patches do."""
        largest = max(operands, key=Tensor.numel)
        if not repeats(largest) or largest.nbytes > _PIECE:
            return operands
        copy = self.copy(largest, "factor")
        return tuple([copy if x is largest else x for x in operands])
