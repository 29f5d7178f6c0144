"""Kernels whose calls a compiler takes, as a part of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from autogram._blocks.kernels.base import Kernels, distinct_or_repeated
from autogram._blocks.kernels.contraction import Prices, carry_out
from autogram._blocks.kernels.workspace import Memory


class TracedKernels(Kernels):
    """The choices of a device, in calls that write into no memory and say nothing of strides.

    A compiler plans memory itself, and may give intermediate results other strides.

    Args:
        own: The kernels of the device.
    """

    is_traced = True

    def __init__(self, own: Kernels) -> None:
        super().__init__(own.limit)
        self._own = own
        self.tiny = own.tiny

    @override
    def prices(self, dtype: torch.dtype) -> Prices:
        return self._own.prices(dtype)

    @override
    def are_rows_worth_memory(self, positions: int, dtype: torch.dtype) -> bool:
        return self._own.are_rows_worth_memory(positions, dtype)

    @override
    def prefers_adjoint(self, patches: int, rows: int, channels: int) -> bool:
        return self._own.prefers_adjoint(patches, rows, channels)

    @override
    def multiplied(self, *dtypes: torch.dtype) -> torch.dtype:
        return self._own.multiplied(*dtypes)

    @override
    def rounded(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._own.rounded(operands)

    @override
    def einsum(
        self, equation: str, operands: Sequence[Tensor], memory: Memory | None = None
    ) -> Tensor:
        dtype = self.multiplied(*{x.dtype for x in operands})
        found = carry_out(self, equation, [x.to(dtype) for x in operands])
        return found.to(self.accumulating(dtype))

    @override
    def rows(
        self, equation: str, operands: Sequence[Tensor], memory: Memory | None = None
    ) -> Tensor:
        dtype = self.multiplied(*{x.dtype for x in operands})
        if dtype == self.accumulating(dtype):
            return self.einsum(equation, operands)
        return torch.einsum(equation, *[x.to(dtype) for x in operands])

    @override
    def total(self, x: Tensor, summed: tuple[int, ...]) -> Tensor:
        return self._own.total(x, summed)

    @override
    def product_sum(self, x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
        dtype = self.accumulating(x.dtype, y.dtype)
        return super().product_sum(x.to(dtype), y.to(dtype), summed)

    @override
    def matrix_product(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        return self._own.matrix_product(x, y)

    @override
    def other_product(self, equation: str, operands: Sequence[Tensor]) -> Tensor:
        return self._own.other_product(equation, operands)

    @override
    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return self._own.multiply(left, right)

    @override
    def gram(self, rows: Tensor) -> Tensor:
        return self._own.gram(rows)

    @override
    def distinct(self, indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return distinct_or_repeated(indices, size)
