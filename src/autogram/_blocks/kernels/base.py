"""Kernels: contractions on one kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from autogram._blocks.kernels.contraction import Hardware, find_contractions
from autogram._blocks.kernels.workspace import Memory


class Limit(Protocol):
    """What an engine, its Jacobians and their contractions share."""

    elements: int
    """How many elements one intermediate result may have."""


class Kernels(Hardware):
    """Contractions by plain calls of PyTorch, right on any device.

    Kernels are the only objects that know a device, a library, or a constant of hardware. A
    subclass for one kind of device overrides what is faster otherwise there.

    Args:
        limit: The number of elements that one intermediate result may have.

    Attributes:
        price_of_memory: What moving one element costs, in multiply-adds of a matrix product.
        tiny: Up to so many elements, copies of factors cost less than a call.
    """

    price_of_memory = 16
    tiny = 2**17

    def __init__(self, limit: Limit) -> None:
        self.limit = limit

    def most_elements(self, dtype: torch.dtype) -> int:
        """How many elements one intermediate result should have."""
        del dtype
        return self.limit.elements

    def accumulating(self, *dtypes: torch.dtype) -> torch.dtype:
        """The dtype of products and sums of tensors of some dtypes: at least float32."""
        return reduce(torch.promote_types, dtypes, torch.float32)

    def einsum(
        self, equation: str, operands: Sequence[Tensor], memory: Memory | None = None
    ) -> Tensor:
        """An einsum in the dtype in which products accumulate, in memory if it is a matrix product.

        Its contractions are found once for shapes and strides.
        """
        dtypes = {x.dtype for x in operands}
        dtype = self.accumulating(*dtypes)
        stack = list(operands) if dtypes == {dtype} else [x.to(dtype) for x in operands]
        shapes, strides = [x.shape for x in stack], [x.stride() for x in stack]
        for positions, contract in find_contractions(equation, tuple(shapes), tuple(strides)):
            taken = [stack.pop(position) for position in positions]
            stack.append(contract(self, taken, None if stack else memory))
        return stack[0]

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """``left @ right.mT`` for rows ``(m, n)`` and ``(m', n)``."""
        return left @ right.mT

    def gram(self, rows: Tensor) -> Tensor:
        """Rows ``(m, n)`` times themselves, ``(m, m)``."""
        return self.multiply(rows, rows)

    def parts_to_mirror(self, cost: int, samples: int) -> int:
        """Into how many ranges of samples to cut a product of a block with itself.

        Half of such a product is the mirror of the other half. Products of parts are smaller.
        """
        del cost, samples
        return 1

    def with_copy(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Operands of several products, of which each would copy the same factor again."""
        return operands
