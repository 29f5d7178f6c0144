"""Einsum paths: found once by opt_einsum for an equation and its shapes, then only carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

import opt_einsum
import torch
from torch import Tensor

from autogram._blocks.block import Shapes, sizes_of
from autogram._blocks.matmul import is_faster, multiply, multiply_batch, zeros_behind
from autogram._blocks.scratch import Memory, Purpose, scratch

# What moving one element through memory costs, in multiply-adds of a matrix product. Measured on
# two CPU cores with MKL: between 10 and 40, depending on how much of the tensor stays in the cache.
MEMORY_COST = 16

# Elements of the products of a batch that are computed at once where their factors are copied.
_PART_OF_BATCH = 2**20

# Elements of a product that is summed up at once: a quarter of a core's cache.
_PART = 2**17


@dataclass(frozen=True)
class Step:
    """One pairwise contraction: which operands leave the stack, and what replaces them."""

    positions: tuple[int, ...]
    contract: Callable[..., Tensor]
    multiplications: int
    elements: int
    """Elements of the result, and of the product before the summation where it is formed."""


@dataclass(frozen=True)
class Path:
    """Pairwise contractions that carry out one einsum, and their cost."""

    steps: tuple[Step, ...]

    @property
    def cost(self) -> int:
        """One number to compare plans by, in multiply-adds."""
        return sum(step.multiplications + MEMORY_COST * step.elements for step in self.steps)

    @property
    def multiplications(self) -> int:
        """Multiply-adds."""
        return sum(step.multiplications for step in self.steps)

    @property
    def largest(self) -> int:
        """Elements of the largest result on the way."""
        return max(step.elements for step in self.steps)

    def __call__(self, operands: Sequence[Tensor], memory: Memory | None = None) -> Tensor:
        """The result of the einsum, in some memory if it is a batch of matrix products."""
        stack = list(operands)
        for step in self.steps:
            taken = [stack.pop(position) for position in step.positions]
            if memory is not None and not stack and isinstance(step.contract, MatrixProduct):
                left, right = taken
                return step.contract(left, right, memory)
            stack.append(step.contract(*taken))
        return stack[0]


@lru_cache(maxsize=4096)
def find_path(equation: str, shapes: Shapes) -> Path:
    """The cheapest path of an einsum, by number of operations."""
    sizes = sizes_of(equation, shapes)
    if len(shapes) <= 2:
        return Path((_step((0,) * len(shapes), equation, sizes),))
    _, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
    return Path(tuple(_step(tuple(found[0]), found[2], sizes) for found in info.contraction_list))


def einsum(equation: str, operands: Sequence[Tensor], memory: Memory | None = None) -> Tensor:
    """``torch.einsum`` along a cached path, as :class:`Path` does it."""
    path = find_path(equation, tuple([x.shape for x in operands]))
    return path(operands, memory)


def _step(positions: tuple[int, ...], equation: str, sizes: Mapping[str, int]) -> Step:
    """How to carry out one contraction.

    Where one side has no index of its own, there is no matrix product to be had, and a product
    followed by a sum reads each operand once. ``torch.einsum`` would permute them for a batched
    matrix product with a single column, which took thirty times as long for ``btcs,btcs->bc``.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    volume = prod(sizes[label] for label in set(inputs) - {","})
    elements = prod(sizes[label] for label in output)
    if len(terms) == 2:
        first, second = terms
        own = [_own(first, second, sizes), _own(second, first, sizes)]
        shared = set(first) & set(second) & set(output)
        if not all(own) and any(sizes[label] > 1 for label in shared):
            contract = partial(_multiply_sum, first, second, output)
            return Step(positions, contract, volume, volume)
        if set("".join(own)) <= set(output):
            product = MatrixProduct.of(first, second, output, sizes)
            return Step(positions, product, volume, elements)
    return Step(positions, partial(torch.einsum, equation), volume, elements)


def _own(labels: str, others: str, sizes: Mapping[str, int]) -> str:
    """The indices that one side has alone, without those of size one."""
    return "".join(label for label in labels if label not in others and sizes[label] != 1)


@dataclass(frozen=True)
class MatrixProduct:
    """An einsum of two operands as one batched matrix product.

    ``torch.einsum`` does the same. With all orders settled beforehand, and patches of an image
    (views that repeat elements) copied in their own order, it took two thirds of the time.
    """

    orders: tuple[tuple[int, ...], tuple[int, ...]]
    """Permutations to (batch, own, summed) and to (batch, summed, own)."""
    shapes: tuple[tuple[int, int, int], tuple[int, int, int]]
    sizes: tuple[int, ...]
    """Of the product's indices: batch, those of the first, those of the second."""
    output: tuple[int, ...]

    @classmethod
    def of(cls, first: str, second: str, output: str, sizes: Mapping[str, int]) -> MatrixProduct:
        """The product that an equation asks for."""
        batch = "".join(label for label in first if label in second and label in output)
        summed = "".join(label for label in first if label in second and label not in output)
        # Indices of size one may stand in one operand alone and not in the result.
        rows = "".join(label for label in first if label not in second)
        columns = "".join(label for label in second if label not in first)
        product = batch + rows + columns
        n = {name: prod(sizes[label] for label in name) for name in (batch, summed, rows, columns)}
        kept = "".join(label for label in product if label in output)
        return cls(
            (_order(first, batch + rows + summed), _order(second, batch + summed + columns)),
            ((n[batch], n[rows], n[summed]), (n[batch], n[summed], n[columns])),
            tuple(sizes[label] for label in kept),
            _order(kept, output),
        )

    def __call__(self, x: Tensor, y: Tensor, memory: Memory | None = None) -> Tensor:
        """The einsum of two tensors, in some memory if it is a batch of products."""
        (n, rows, summed), (_, _, columns) = self.shapes
        is_other_faster = is_faster(x, n, rows, summed, columns)
        out = None
        if memory is not None and not (is_other_faster and n == 1):
            out = memory((n, rows, columns), x)
        if is_other_faster and n > 1 and self._has_runs(x, y):
            result = self._by_parts(x, y, out)
        else:
            left = _arranged(x, self.orders[0], self.shapes[0], "first")
            right = _arranged(y, self.orders[1], self.shapes[1], "second")
            if is_other_faster and n == 1:
                result = multiply(left[0], right[0].mT)
            else:
                result = torch.bmm(left, right, out=out)
        return result.reshape(self.sizes).permute(self.output)

    def _has_runs(self, x: Tensor, y: Tensor) -> bool:
        """Whether the matrices can be copied without transposing them, which takes too long."""
        return all(z.stride(order[-1]) == 1 for z, order in zip((x, y), self.orders, strict=True))

    def _by_parts(self, x: Tensor, y: Tensor, out: Tensor | None) -> Tensor:
        """The products of some samples at a time, so that what is copied stays in the cache."""
        (n, rows, summed), (_, _, columns) = self.shapes
        x, y = x.permute(self.orders[0]), y.permute(self.orders[1])
        if out is None:
            out = x.new_empty(n, rows, columns)
        zeros = zeros_behind(rows, summed)
        inner = n // len(x)  # products for each index of the first dimension of the batch
        step = max(2, _PART_OF_BATCH // (inner * rows * columns))
        for start in range(0, len(x), step):
            count = min(step, len(x) - start)
            part = slice(start * inner, (start + count) * inner)
            left = _padded(x.narrow(0, start, count), (rows, summed), (0, zeros), "first")
            right = _padded(y.narrow(0, start, count), (summed, columns), (zeros, 0), "second")
            out[part] = multiply_batch(left, right)
        return out


def _padded(
    tensor: Tensor, shape: tuple[int, int], zeros: tuple[int, int], purpose: Purpose
) -> Tensor:
    """A contiguous batch of matrices, with zeros behind their rows and columns, valid for now."""
    rows, columns = shape
    n = tensor.numel() // (rows * columns)
    padded = (n, rows + zeros[0], columns + zeros[1])
    memory = scratch(purpose, padded, tensor)
    if memory is None:
        memory = tensor.new_empty(padded)
    memory[:, rows:] = 0
    memory[:, :, columns:] = 0
    memory[:, :rows, :columns].view(tensor.shape).copy_(tensor)
    return memory


def _order(labels: str, wanted: str) -> tuple[int, ...]:
    """The permutation of ``labels`` that gives ``wanted``."""
    return tuple(labels.index(label) for label in wanted)


def _arranged(
    tensor: Tensor, order: tuple[int, ...], shape: tuple[int, ...], purpose: Purpose
) -> Tensor:
    """An operand as a matrix product takes it: a view of it, or a copy that is valid for now."""
    if repeats(tensor):
        return _copy(tensor, purpose).permute(order).reshape(shape)
    arranged = tensor.permute(order)
    if _can_be_viewed(arranged.shape, arranged.stride(), shape):
        return arranged.view(shape)
    return _copy(arranged, purpose).view(shape)


@lru_cache(maxsize=4096)
def _can_be_viewed(sizes: torch.Size, strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether dimensions lie in memory so that they can be joined to a shape."""
    try:
        torch.empty_strided(sizes, strides, device="meta").view(shape)
    except RuntimeError:  # raising it takes longer than a small product
        return False
    return True


def _copy(tensor: Tensor, purpose: Purpose) -> Tensor:
    """A contiguous copy."""
    memory = scratch(purpose, tensor.shape, tensor)
    return tensor.contiguous() if memory is None else memory.copy_(tensor)


def repeats(tensor: Tensor) -> bool:
    """Whether a view reads some elements of its storage more than once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((n - 1) * stride for n, stride in pairs) + 1 < tensor.numel()


def _multiply_sum(first: str, second: str, output: str, x: Tensor, y: Tensor) -> Tensor:
    """An einsum of two operands as a broadcast product and a sum, in the order of the larger.

    Outer indices of the result are taken in parts, so that a part's product stays in the cache.
    """
    order = first if x.numel() >= y.numel() else second
    order += "".join(label for label in first + second if label not in order)
    x, y = _align(x, first, order), _align(y, second, order)
    summed = [dim for dim, label in enumerate(order) if label not in output]
    kept = [label for label in order if label in output]
    total = _sum_of_product(x, y, summed)
    return total.permute([kept.index(label) for label in output])


def _sum_of_product(x: Tensor, y: Tensor, summed: list[int]) -> Tensor:
    """The product of two tensors of equally many dimensions, summed over some of them."""
    # By hand: `torch.broadcast_shapes` takes longer than a small product.
    shape = [m if n == 1 else n for n, m in zip(x.shape, y.shape, strict=True)]
    elements = prod(shape)
    dim = next((d for d, n in enumerate(shape) if n > 1 and d not in summed), None)
    if not summed or dim is None or elements <= _PART or x.device.type != "cpu":
        product = x * y
        if all(shape[d] == 1 for d in summed):
            return product.squeeze(summed)  # a sum would read and write it once more
        return product.sum(summed)
    step = max(1, shape[dim] * _PART // elements)
    parts = []
    for start in range(0, shape[dim], step):
        some = [
            z if z.shape[dim] == 1 else z.narrow(dim, start, min(step, shape[dim] - start))
            for z in (x, y)
        ]
        sizes = torch.broadcast_shapes(some[0].shape, some[1].shape)
        product = torch.mul(*some, out=scratch("result", sizes, x))
        parts.append(product.sum(summed))
    return torch.cat(parts, dim - sum(d < dim for d in summed))


def _align(tensor: Tensor, labels: str, order: str) -> Tensor:
    """The tensor with its dimensions in ``order``, and ones for the missing."""
    present = [label for label in order if label in labels]
    tensor = tensor.permute([labels.index(label) for label in present])
    return tensor[tuple(slice(None) if label in labels else None for label in order)]
