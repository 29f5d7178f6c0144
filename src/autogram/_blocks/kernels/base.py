"""Kernels: contractions on one kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import prod

import torch
from torch import Tensor

from autogram._blocks.kernels.contraction import Contraction, View, form_of_view
from autogram._blocks.kernels.paths import Prices, find_path
from autogram._blocks.kernels.workspace import Memory, Purpose
from autogram._blocks.programs.known import Programs


@dataclass
class Limit:
    """The largest number of elements of one intermediate result.

    An engine and all its Jacobians share one object: after memory has run out, the limit is lowered
    for all of them.
    """

    elements: int


class Kernels:
    """Contractions with plain PyTorch calls, correct on any device.

    Only kernels depend on a device, a library, or a constant of hardware. A
    subclass for one kind of device overrides the methods for which that device has a faster way.
    """

    tiny = 2**17
    """Blocks of at most this many elements are bundled: copies take less time than calls."""

    form_of_view = staticmethod(form_of_view)

    def __init__(self, limit: Limit, programs: Programs | None = None) -> None:
        self.limit = limit
        self.programs = programs or Programs()

    def most_elements(self, dtype: torch.dtype) -> int:
        """The preferred number of elements of one intermediate result."""
        return self.limit.elements

    def scratch(self, shape: Sequence[int], like: Tensor, purpose: Purpose = "rows") -> Tensor:
        """A contiguous tensor, valid until memory for the same purpose is requested again."""
        return like.new_empty(shape)

    def copy(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """A contiguous copy in scratch memory."""
        return self.scratch(tensor.shape, tensor, purpose).copy_(tensor)

    def at_once(self, elements: int, like: Tensor) -> int:
        """The number of elements to write before reading them, of a total that is read once."""
        return min(elements, self.limit.elements)

    def prices(self, dtype: torch.dtype) -> Prices:
        """The prices of memory and of calls, in multiply-adds of tensors of a dtype."""
        return Prices(memory=16)

    def room(self, device: torch.device) -> int:
        """The number of elements of rows to keep from a step's Gramian for its gradients."""
        return self.limit.elements

    def are_rows_worth_memory(self, positions: float, dtype: torch.dtype) -> bool:
        """Whether reading kept rows is faster than contracting factors over some positions again.

        The second number is that of multiply-adds for each element of the rows.
        """
        return True

    @staticmethod
    @lru_cache(maxsize=64)
    def accumulating(*dtypes: torch.dtype) -> torch.dtype:
        """The dtype of products and sums of tensors of some dtypes: at least float32."""
        return reduce(torch.promote_types, dtypes, torch.float32)

    multiplied = accumulating
    """The dtype in which factors of some dtypes are multiplied."""

    def rounded(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A cotangent and factors, with the precision of the call in the forward pass."""
        return operands

    def einsum(
        self, equation: str, operands: Sequence[Tensor], memory: Memory | None = None
    ) -> Tensor:
        """An einsum in the dtype in which products accumulate, in memory if it is a matrix product.

        ``torch.einsum`` reads its equation at each call, which takes longer than a small product.
        """
        dtypes = {x.dtype for x in operands}
        dtype = self.multiplied(*dtypes)
        if dtypes != {dtype}:
            operands = [x.to(dtype) for x in operands]
        wide = self.accumulating(dtype)
        result = self.carry_out(equation, operands, memory if dtype == wide else None)
        return result if result.dtype == wide else result.to(wide)

    rows = einsum
    """Explicit rows from the equation and the factors of a block, as :meth:`einsum`."""

    def carry_out(self, equation: str, operands: Sequence[Tensor], memory: Memory | None) -> Tensor:
        """Carries out an einsum, in given memory if it is a matrix product."""
        stack = list(operands)
        for positions, of in find_path(equation, tuple([x.shape for x in operands])).steps:
            taken = [stack.pop(position) for position in positions]
            if of.kind == "matrices":
                result = self._matrices(of, taken, None if stack else memory)
            elif of.kind == "elementwise":
                x, y = map(self._viewed, taken, of.views)
                result = self.product_sum(x, y, of.summed)
            elif of.kind == "sum":
                (x,) = taken
                result = x.sum(of.summed, dtype=self.accumulating(x.dtype)) if of.summed else x
            else:
                dtype = self.accumulating(*[x.dtype for x in taken])
                result = torch.einsum(of.equation, *[x.to(dtype) for x in taken])
            stack.append(result if of.order is None else result.permute(of.order))
        return stack[0]

    def _matrices(
        self, of: Contraction, operands: Sequence[Tensor], memory: Memory | None
    ) -> Tensor:
        """A product of matrices, or a batch of them, in ranges if too much would be copied."""
        x, y = operands[::-1] if of.is_swapped else operands
        left, right = of.views
        at_left = self.form_of_view(x.shape, x.stride(), *left)
        at_right = self.form_of_view(y.shape, y.stride(), *right)
        copied = (at_left is None) * x.numel() + (at_right is None) * y.numel()
        step = size = x.shape[of.ranges[0]] if of.ranges and copied else 1
        if size > 1:
            step = max(1, size * self.at_once(copied, operands[0]) // copied)
        if step < size:
            product = self._in_ranges(of, x, y, step, memory)
        else:
            if at_left != ():
                x = x.as_strided(*at_left) if at_left else self.arranged(x, *left, "first")
            if at_right != ():
                y = y.as_strided(*at_right) if at_right else self.arranged(y, *right, "second")
            out = None if memory is None else memory((*x.shape[:-1], y.shape[-1]), x)
            product = self.matrix_product(x, y, out)
        return product if of.unfolded is None else product.view(of.unfolded)

    def _in_ranges(
        self, of: Contraction, x: Tensor, y: Tensor, step: int, memory: Memory | None
    ) -> Tensor:
        """A batch of matrix products, each range of some steps in its part of the memory."""
        (_, (n, rows, _)), (_, (_, _, columns)) = of.views
        shape = (n, rows, columns)
        if memory is None:
            total = x.new_empty(shape, dtype=self.accumulating(x.dtype))
        else:
            total = memory(shape, x)
        first, second = of.ranges
        parts = total.split(step * n // x.shape[first])
        ranges = zip(x.split(step, first), y.split(step, second), parts, strict=True)
        for of_x, of_y, out in ranges:  # each is cut again where it is still too much
            both = (of_y, of_x) if of.is_swapped else (of_x, of_y)
            self.carry_out(of.equation, both, partial(_in_shape, out))
        return total

    def _viewed(self, tensor: Tensor, view: View) -> Tensor:
        """A view of a tensor in another order and shape, without a copy."""
        form = self.form_of_view(tensor.shape, tensor.stride(), *view)
        if form is None:
            return self.arranged(tensor, *view, "first")
        return tensor.as_strided(*form) if form else tensor

    def arranged(
        self, tensor: Tensor, order: tuple[int, ...], shape: tuple[int, ...], purpose: Purpose
    ) -> Tensor:
        """A copy of a tensor in another order and shape."""
        return self.copy(tensor.permute(order), purpose).view(shape)

    def product_sum(self, x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
        """The product of two tensors, summed in at least float32, in parts of the result."""
        x, y = (x, y) if x.numel() > y.numel() else (y, x)
        y = y.to(self.accumulating(x.dtype, y.dtype))  # no wider copy of the larger one
        if not summed:
            return x * y
        shape = [m if n == 1 else n for n, m in zip(x.shape, y.shape, strict=True)]
        elements = prod(shape)
        dim = next((d for d, n in enumerate(shape) if n > 1 and d not in summed), None)
        at_once = self.at_once(elements, y)
        if dim is None or elements <= at_once:
            return (x * y).sum(summed)
        step = max(1, shape[dim] * at_once // elements)

        def part(start: int) -> Tensor:
            n = min(step, shape[dim] - start)
            some = [z if z.shape[dim] == 1 else z.narrow(dim, start, n) for z in (x, y)]
            out = self.scratch([*shape[:dim], n, *shape[dim + 1 :]], y)
            return torch.mul(*some, out=out).sum(summed)

        parts = [part(start) for start in range(0, shape[dim], step)]
        return torch.cat(parts, dim - sum(d < dim for d in summed))

    def matrix_product(self, x: Tensor, y: Tensor, out: Tensor | None) -> Tensor:
        """The product of two matrices, or of two batches of them, in some memory."""
        return (torch.mm if x.dim() == 2 else torch.bmm)(x, y, out=out)

    def prefers_adjoint(self, patches: int, rows: int, channels: int, *dtypes: torch.dtype) -> bool:
        """Whether rows of a convolution are faster from its gradient, with samples as groups.

        The arguments count the elements of patches to copy otherwise, and the kernel's channels.
        """
        return False

    def weighed(self, tensor: Tensor, weights: Tensor) -> Tensor:
        """A factor times its samples' weights, ready for products with other factors."""
        return tensor * weights

    def weighted_sum(self, equation: str, operands: Sequence[Tensor]) -> Tensor:
        """Sums of rows ``(s, *tensor)``: an einsum of weights ``(s, k, b)`` with their factors."""
        return self.einsum(equation, operands)

    def shared(self, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The form of the weights for sums of rows in a dtype, computed once for all parameters."""
        return ()

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """``left @ right.mT`` for rows ``(m, n)`` and ``(m', n)``, long ones in parts of n."""
        parts = self.parts(left)
        if parts == 1:
            return self.matrix_product(left, right.mT, None)
        left, right = (x.reshape(x.shape[0], parts, -1).transpose(0, 1) for x in (left, right))
        return torch.bmm(left, right.mT).sum(0)  # (parts, m, m') summed

    def parts(self, rows: Tensor) -> int:
        """The number of parts of a product of rows ``(m, n)`` along n."""
        return 1

    def gram(self, rows: Tensor) -> Tensor:
        """Rows ``(m, n)`` times themselves, ``(m, m)``."""
        return self.multiply(rows, rows)

    def distinct(self, indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The values below ``size`` in some indices, ascending, and the place of each index."""
        found: tuple[Tensor, Tensor] = torch.unique(indices, return_inverse=True)
        return found

    def with_copy(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The operands, with a copy of a factor that several products would each copy."""
        return operands


def _in_shape(out: Tensor, shape: Sequence[int], _like: Tensor) -> Tensor:
    return out.view(tuple(shape))


def distinct_or_repeated(indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """As :meth:`Kernels.distinct`, in tensors whose sizes do not depend on values.

    The last of the values is repeated as often as needed, and no index is at a repeated one.
    """
    if indices.numel() >= size:
        return torch.arange(size, device=indices.device), indices
    ordered, order = indices.flatten().sort()
    ranks = torch.zeros_like(ordered)
    ranks[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    places = torch.empty_like(order).scatter_(0, order, ranks)
    padded = ordered[-1:].repeat(len(ordered)).scatter_(0, ranks, ordered)
    return padded, places.view(indices.shape)
