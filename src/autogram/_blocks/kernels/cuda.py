"""Kernels for a GPU: few launches, and products of factors in half precision.

The numbers here were measured on one GPU of 2023, in multiply-adds of its matrix units. They
affect speed, but never correctness.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor
from typing_extensions import override

from autogram._blocks.kernels.base import Kernels, distinct_or_repeated
from autogram._blocks.kernels.paths import Prices
from autogram._blocks.kernels.workspace import Memory

_HALVES = (torch.float16, torch.bfloat16)

# Writing one element and reading it again, if a multiply-add takes 3, 7, 35 and 35 fs.
_PRICE_IN_HALF = 256
_PRICE_IN_TF32 = 192
_PRICE_IN_FULL = 32

# Launching an operation takes as long as writing this many elements.
_LAUNCH = 2**22

# A product of few long rows, in float32 without tensor cores, leaves most processors idle. Cut into
# two parts for each of them, it took between a fifth and half of the time. Parts have at least this
# many columns.
_FEWEST_COLUMNS = 512
_PARTS_PER_PROCESSOR = 2

# Rows that are larger than their factors may take half of the free memory, and a third of
# the memory in use without them, and copies of factors an eighth: the step of a small model must
# not need several times its memory.
_SHARE_OF_FREE, _SHARE_OF_TAKEN, _SHARE_OF_COPIES = 2, 3, 8

# Rows of a convolution whose samples are groups cost three times as much per element as patches.
# With few channels, that kernel is slow for any size. For a single channel, PyTorch has a kernel
# that is as fast for the rows as for the sum over the samples.
_PATCHES_PER_ROW = 3
_FEWEST_CHANNELS = 16


class CudaKernels(Kernels):
    """Contractions on a GPU.

    Factors in half precision are multiplied without conversion, and summed in float32. Rows have
    the dtype of the factors; their products are in float32. In float32, PyTorch's own settings
    decide about TF32.
    """

    tiny = 2**20  # copying so many elements takes a quarter of a launch

    _halves: tuple[weakref.ref[Tensor], Tensor, Tensor] | None = None

    @override
    def prices(self, dtype: torch.dtype) -> Prices:
        memory = _PRICE_IN_FULL
        if dtype in _HALVES:
            memory = _PRICE_IN_HALF
        elif dtype == torch.float32 and _is_tf32():
            memory = _PRICE_IN_TF32
        return Prices(memory, memory * _LAUNCH)

    @override
    def room(self, device: torch.device) -> int:
        free, taken = _bytes(device)
        allowed = min(free // _SHARE_OF_FREE, taken // _SHARE_OF_TAKEN)
        return allowed // torch.float32.itemsize

    @override
    def at_once(self, elements: int, like: Tensor) -> int:
        """All, unless that is much compared with a factor, and with the memory of the step."""
        if elements > max(_LAUNCH, 2 * like.numel()):
            taken = _bytes(like.device)[1] // _SHARE_OF_COPIES // like.dtype.itemsize
            elements = min(elements, max(_LAUNCH, taken))
        return super().at_once(elements, like)

    @override
    def are_rows_worth_memory(self, positions: float, dtype: torch.dtype) -> bool:
        return positions > self.prices(dtype).memory

    @staticmethod
    @lru_cache(maxsize=64)
    @override
    def multiplied(*dtypes: torch.dtype) -> torch.dtype:
        is_half = dtypes[0] in _HALVES and len(set(dtypes)) == 1
        return dtypes[0] if is_half else Kernels.accumulating(*dtypes)

    @override
    def rounded(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """With the factors in half precision if the cotangent is.

        The result of the call was in half precision, so the call has rounded its arguments
        (autocast does so after a normalisation in float32). A single number is not rounded, because
        it does not widen a result. For factors that a rule computes, the cotangent is in float32.
        """
        half, *dtypes = [x.dtype for x in operands]
        if half not in _HALVES or torch.float32 not in dtypes:
            return operands
        return tuple([x.to(half) if x.dtype == torch.float32 and x.dim() else x for x in operands])

    @override
    def rows(
        self, equation: str, operands: Sequence[Tensor], memory: Memory | None = None
    ) -> Tensor:
        if not _are_half(operands):
            return self.einsum(equation, operands, memory)
        return self.carry_out(equation, operands, memory or self.scratch)

    @override
    def matrix_product(self, x: Tensor, y: Tensor, out: Tensor | None) -> Tensor:
        """In memory, in its dtype; else in at least float32."""
        if out is not None and x.dtype == y.dtype == out.dtype:
            return super().matrix_product(x, y, out)
        product = self._accumulated(x, y)
        return product if out is None else out.copy_(product)

    @override
    def distinct(self, indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Without waiting for their number."""
        return distinct_or_repeated(indices, size)

    @override
    def prefers_adjoint(self, patches: int, rows: int, channels: int, *dtypes: torch.dtype) -> bool:
        is_fast = channels == 1 or channels >= _FEWEST_CHANNELS
        return is_fast and patches > _PATCHES_PER_ROW * rows

    @override
    def weighed(self, tensor: Tensor, weights: Tensor) -> Tensor:
        """In the dtype of the tensor, as an ordinary backward pass would have it."""
        if tensor.dtype not in _HALVES:
            return super().weighed(tensor, weights)
        shape = torch.broadcast_shapes(tensor.shape, weights.shape)
        return torch.mul(tensor, weights, out=tensor.new_empty(shape))

    @override
    def weighted_sum(self, equation: str, operands: Sequence[Tensor]) -> Tensor:
        _, cotangent, *rest = equation.split("->")[0].split(",")
        weights, *factors = operands
        if not _are_half(factors) or not {"k", "b"} <= set(cotangent):
            return super().weighted_sum(equation, operands)
        if not rest:
            return self._weighted_rows(equation, weights, *factors)
        if cotangent.index("b") < cotangent.index("k"):
            weights = weights.mT
        sizes = iter(weights.shape[1:])
        shape = [next(sizes) if label in "kb" else 1 for label in cotangent]
        weighed = self.weighed(factors[0].unsqueeze(0), weights.reshape(len(weights), *shape))
        # The index of weights is that of weighed cotangents now, which stand in their place.
        return self.einsum(equation.replace("kb,", "", 1), (weighed, *factors[1:]))

    @override
    def shared(self, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._in_halves(weights, dtype) if dtype in _HALVES else ()

    def _weighted_rows(self, equation: str, weights: Tensor, rows: Tensor) -> Tensor:
        """Sums of rows in half precision, without a wider copy."""
        both, scale = self._in_halves(weights, rows.dtype)
        sums = self.einsum(equation, (both, rows))
        return (sums[: len(weights)] + sums[len(weights) :]) * scale

    def _in_halves(self, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Each weight as the sum of two numbers in half precision, ``(2 s, k, b)``, and a scale.

        The two numbers hold all but the last bits of the weight. They are computed once if the
        same tensor weights the rows of several parameters in turn.
        """
        if self._halves is not None:
            known, both, scale = self._halves
            if known() is weights and both.dtype == dtype:
                return both, scale
        scale = weights.abs().amax().clamp(min=torch.finfo(weights.dtype).tiny)
        unit = weights / scale
        upper = unit.to(dtype)
        both = torch.cat([upper, (unit - upper).to(dtype)])
        self._halves = weakref.ref(weights), both, scale
        return both, scale

    def _accumulated(self, x: Tensor, y: Tensor) -> Tensor:
        """The product of two matrices, or of two batches of them, in at least float32."""
        if x.dtype != y.dtype or (x.dtype in _HALVES and not _can_accumulate(x.device, x.dtype)):
            dtype = self.accumulating(x.dtype, y.dtype)
            x, y = x.to(dtype), y.to(dtype)
        if x.dtype not in _HALVES:
            return (torch.mm if x.dim() == 2 else torch.bmm)(x, y)
        return (torch.mm if x.dim() == 2 else torch.bmm)(x, y, out_dtype=torch.float32)

    @override
    def parts(self, rows: Tensor) -> int:
        columns = rows.shape[1]
        if rows.dtype != torch.float32 or columns < 2 * _FEWEST_COLUMNS or _is_tf32():
            return 1
        wanted = _PARTS_PER_PROCESSOR * _processors(rows.device)
        parts = gcd(columns, 1 << (wanted.bit_length() - 1))
        while parts > 1 and columns < parts * _FEWEST_COLUMNS:
            parts //= 2
        return parts


def _are_half(operands: Sequence[Tensor]) -> bool:
    first = operands[0].dtype
    return first in _HALVES and all(x.dtype == first for x in operands)


def _is_tf32() -> bool:
    """Whether PyTorch may round the operands of products in float32."""
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


def _bytes(device: torch.device) -> tuple[int, int]:
    """Free and used memory of a device for this process, without asking the device."""
    total = int(torch.cuda.get_device_properties(device).total_memory)
    try:  # `torch.cuda.memory_allocated` would list and sort all statistics for this one
        statistics = torch.cuda.memory_stats_as_nested_dict(device)
        taken = int(statistics["allocated_bytes"]["all"]["current"])
    except RuntimeError:  # another allocator than PyTorch's may count nothing
        taken = 0
    return total - taken, taken


@lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=64)
def _can_accumulate(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products in half precision can have a result in float32: not in all builds."""
    sample = torch.zeros(1, 8, 8, dtype=dtype, device=device)
    try:
        torch.bmm(sample, sample, out_dtype=torch.float32)
        torch.mm(sample.squeeze(0), sample.squeeze(0), out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True
