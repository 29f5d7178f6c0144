"""Kernels whose calls become part of a compiler's graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from autogram._blocks.kernels.base import Kernels, distinct_or_repeated
from autogram._blocks.kernels.cpu import CpuKernels
from autogram._blocks.kernels.cuda import CudaKernels
from autogram._blocks.kernels.workspace import Memory, Purpose


class TracedKernels(Kernels):
    """The choices of a device, in calls that write into no memory and say nothing of strides.

    A compiler plans memory itself, and may give intermediate results other strides.
    """

    room = Kernels.room
    most_elements = Kernels.most_elements
    with_copy = Kernels.with_copy
    scratch = Kernels.scratch
    weighed = Kernels.weighed
    weighted_sum = Kernels.weighted_sum

    @override
    def rows(
        self, equation: str, operands: Sequence[Tensor], memory: Memory | None = None
    ) -> Tensor:
        dtype = self.multiplied(*{x.dtype for x in operands})
        if dtype == self.accumulating(dtype):
            return self.einsum(equation, operands)
        return torch.einsum(equation, *[x.to(dtype) for x in operands])

    @override
    def at_once(self, elements: int, like: Tensor) -> int:
        return elements

    @staticmethod
    @override
    def form_of_view(*_: Hashable, **__: Hashable) -> None:
        """Unknown, as strides are."""

    @override
    def arranged(
        self, tensor: Tensor, order: tuple[int, ...], shape: tuple[int, ...], purpose: Purpose
    ) -> Tensor:
        """Only where it must be one."""
        return tensor.permute(order).reshape(shape)

    @override
    def distinct(self, indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return distinct_or_repeated(indices, size)


class TracedCpuKernels(TracedKernels, CpuKernels):
    """Those of a CPU."""


class TracedCudaKernels(TracedKernels, CudaKernels):
    """Those of a GPU."""

    @override
    def _accumulated(self, x: Tensor, y: Tensor) -> Tensor:
        """Thin products of factors in float32.

        Inductor makes products and sums of them, and forgets there that results are in float32.
        """
        if 1 in (*x.shape[-2:], y.shape[-1]):
            dtype = self.accumulating(x.dtype, y.dtype)
            x, y = x.to(dtype), y.to(dtype)
        return super()._accumulated(x, y)
