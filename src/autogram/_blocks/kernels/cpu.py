"""Kernels for a CPU: pieces that stay in its caches, and memory that is used again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autogram._blocks.kernels.base import Kernels, Limit
from autogram._blocks.kernels.contraction import repeats
from autogram._blocks.kernels.workspace import Purpose, Workspace

# Bytes of one piece of rows, or of a copy of a factor. Larger results are written piece by piece
# into the same memory: of the sizes from 8 to 128 MiB, the smallest that was as fast as the best.
_PIECE = 2**26

# Elements of an elementwise product that is summed at once, so that the product stays in a cache.
_PRODUCT = 2**17

# With fewer samples on a side, products are too thin to gain from leaving out their mirror.
_FEWEST_SAMPLES = 16
_WORTH_MIRRORING = 2**28

# A matrix product with few rows and columns and a long sum leaves all but one thread with little
# to do. Cut into parts of the sum, the product took three quarters of the time on two threads.
_WORTH_SPLITTING = 2**19
_PARTS = 4

# A compiled graph takes fresh memory in each step, for what it leaves and for large intermediate
# results. The system clears each page of it, which takes longer than writing the results. With more
# elements than these, that costs more than the calls of a contraction whose memory is used again.
_FRESH_INSIDE = 2**22
_FRESH_BEHIND = 2**17


class CpuKernels(Kernels):
    """Contractions on a CPU.

    Attributes:
        workspace: Memory that is used again.
    """

    tiny = 2**13

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.workspace = Workspace()

    def most_elements(self, dtype: torch.dtype) -> int:
        """The limit, or what fits in one piece."""
        return min(self.limit.elements, _PIECE // self.accumulating(dtype).itemsize)

    def scratch(self, shape: Sequence[int], like: Tensor, purpose: Purpose = "rows") -> Tensor:
        """Memory of this thread, unless it would be larger than a piece."""
        if prod(shape) * like.dtype.itemsize > _PIECE:
            return like.new_empty(shape)
        return self.workspace.scratch(shape, like, purpose)

    def permuted_patches(self, patches: Tensor, order: tuple[int, ...], purpose: Purpose) -> Tensor:
        """By two copies: the first reads long runs of channels, which takes most of the time."""
        return self.copy(patches, purpose).permute(order).contiguous()

    def product_sum(self, x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
        """The product of two tensors, summed, in parts of the result."""
        if not summed:
            return x * y
        shape = [m if n == 1 else n for n, m in zip(x.shape, y.shape, strict=True)]
        elements = prod(shape)
        dim = next((d for d, n in enumerate(shape) if n > 1 and d not in summed), None)
        if dim is None or elements <= _PRODUCT:
            return (x * y).sum(summed)
        step = max(1, shape[dim] * _PRODUCT // elements)
        parts = []
        for start in range(0, shape[dim], step):
            n = min(step, shape[dim] - start)
            some = [z if z.shape[dim] == 1 else z.narrow(dim, start, n) for z in (x, y)]
            out = self.scratch([*shape[:dim], n, *shape[dim + 1 :]], x)
            parts.append(torch.mul(*some, out=out).sum(summed))
        return torch.cat(parts, dim - sum(d < dim for d in summed))

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """``left @ right.mT``, long sums in parts."""
        if left.numel() < _WORTH_SPLITTING or left.shape[1] % _PARTS:
            return left @ right.mT
        left, right = (x.reshape(len(x), _PARTS, -1).transpose(0, 1) for x in (left, right))
        return torch.bmm(left, right.mT).sum(0)  # (parts, m, m') summed

    def gram(self, rows: Tensor) -> Tensor:
        """Rows times themselves, of which one of two mixed quarters is the mirror of the other."""
        m = len(rows)
        if m < 2 * _FEWEST_SAMPLES or rows.numel() < _WORTH_SPLITTING:
            return self.multiply(rows, rows)
        half = m // 2
        left = self.multiply(rows, rows[:half])  # (m, half)
        last = self.multiply(rows[half:], rows[half:])
        return torch.cat([left, torch.cat([left[half:].mT, last])], 1)

    def prefers_calls(self, largest: int, kept: int) -> bool:
        """Whether a compiled graph would take much fresh memory."""
        return largest > _FRESH_INSIDE or kept > _FRESH_BEHIND

    def parts_to_mirror(self, cost: int, samples: int) -> int:
        """Into how many ranges of samples to cut a product of a block with itself."""
        return min(4, samples // _FEWEST_SAMPLES) if cost > _WORTH_MIRRORING else 1

    def with_copy(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The operands with one copy of the largest, if that repeats elements, as patches do."""
        largest = max(operands, key=Tensor.numel)
        if not repeats(largest) or largest.nbytes > _PIECE:
            return operands
        copy = self.copy(largest, "factor")
        return tuple([copy if x is largest else x for x in operands])
