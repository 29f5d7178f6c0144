"""Kernels: contractions on one kind of device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from autogram._blocks.kernels.contraction import Einsum, Elementwise, Matrices, find_einsum

# Gives memory for a tensor of some shape, like another one.
Memory = Callable[[Sequence[int], Tensor], Tensor]


class Limit(Protocol):
    """What an engine, its Jacobians and their contractions share."""

    elements: int
    """How many elements one intermediate result may have."""


class Kernels:
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
        dtype = torch.float32
        for other in dtypes:
            dtype = dtype if other is dtype else torch.promote_types(dtype, other)
        return dtype

    def einsum(
        self, equation: str, operands: Sequence[Tensor], memory: Memory | None = None
    ) -> Tensor:
        """An einsum along a path that is found once for its shapes.

        Args:
            equation: That of ``torch.einsum``.
            operands: Of any floating-point dtypes.
            memory: Where to put the result if it is a matrix product.

        Returns:
            The result, in the dtype in which products accumulate.
        """
        einsum = find_einsum(equation, tuple([x.shape for x in operands]))
        return self.run(einsum, operands, memory)

    def run(
        self, einsum: Einsum, operands: Sequence[Tensor], memory: Memory | None = None
    ) -> Tensor:
        """Carries out an einsum, as :meth:`einsum` does."""
        stack = self._promoted(operands)
        for step in einsum.steps:
            taken = [stack.pop(position) for position in step.positions]
            if isinstance(step.contract, Matrices):
                (x, y), out = taken, None if stack else memory
                stack.append(self.multiply_matrices(step.contract, x, y, out))
            elif isinstance(step.contract, Elementwise):
                stack.append(self.multiply_elements(step.contract, *taken))
            else:
                stack.append(step.contract(*taken))
        return stack[0]

    def multiply_matrices(
        self, how: Matrices, x: Tensor, y: Tensor, memory: Memory | None = None
    ) -> Tensor:
        """An einsum of two tensors as one batched matrix product."""
        left, right = how.arranged(x, y)
        (n, rows, _), (_, _, columns) = how.shapes
        out = None if memory is None else memory((n, rows, columns), left)
        return how.restored(torch.bmm(left, right, out=out))

    def multiply_elements(self, how: Elementwise, x: Tensor, y: Tensor) -> Tensor:
        """An einsum of two tensors as a product and a sum."""
        return how.restored(how.product_sum(*how.aligned(x, y)))

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

    def scratch_rows(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for rows that are read once."""
        return like.new_empty(shape)

    def with_copy(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Operands of several products, of which each would copy the same factor again."""
        return operands

    def _promoted(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Operands in the dtype in which their products accumulate."""
        dtype = operands[0].dtype
        if dtype.itemsize >= 4 and all(x.dtype is dtype for x in operands):
            return list(operands)
        dtype = self.accumulating(*[x.dtype for x in operands])
        return [x.to(dtype) for x in operands]
