"""Contractions: einsums of one or two tensors, with all that their equation asks for settled.

``torch.einsum`` reads its equation each time, which takes longer than a small contraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autogram._blocks.scratch import Memory, Purpose, allocate, scratch

# Elements of a product that is summed up at once: a quarter of a core's cache.
_PART = 2**17


@dataclass(frozen=True)
class Sum:
    """An einsum of one operand."""

    summed: tuple[int, ...]
    output: tuple[int, ...]
    """The order of the dimensions that are left."""

    @classmethod
    def of(cls, labels: str, output: str) -> Sum:
        """The sum that an equation asks for."""
        summed = tuple(dim for dim, label in enumerate(labels) if label not in output)
        kept = "".join(label for label in labels if label in output)
        return cls(summed, _order(kept, output))

    def __call__(self, x: Tensor) -> Tensor:
        """The einsum of a tensor."""
        total = x.sum(self.summed) if self.summed else x
        return total.permute(self.output)


@dataclass(frozen=True)
class ProductSum:
    """An einsum of two operands as a broadcast product and a sum, in the order of the larger.

    Outer indices of the result are taken in parts, so that a part's product stays in the cache.
    """

    single: tuple[tuple[int, ...], tuple[int, ...]]
    """Dimensions of size one, without which the operands are multiplied."""
    orders: tuple[tuple[int, ...], tuple[int, ...]]
    missing: tuple[tuple[int, ...], tuple[int, ...]]
    """Dimensions of the product that the first and the second operand do not have."""
    summed: tuple[int, ...]
    output: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of the result."""

    @classmethod
    def of(cls, first: str, second: str, output: str, sizes: Mapping[str, int]) -> ProductSum:
        """The product that an equation asks for."""
        single = [tuple(d for d, x in enumerate(of) if sizes[x] == 1) for of in (first, second)]
        shape = tuple(sizes[label] for label in output)
        first, second, output = (
            "".join(label for label in labels if sizes[label] != 1)
            for labels in (first, second, output)
        )
        x, y = (prod(sizes[label] for label in labels) for labels in (first, second))
        product = "".join(dict.fromkeys(first + second if x >= y else second + first))
        total = Sum.of(product, output)
        return cls(
            (single[0], single[1]),
            (_present(first, product), _present(second, product)),
            (_missing(first, product), _missing(second, product)),
            total.summed,
            total.output,
            shape,
        )

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The einsum of two tensors."""
        x, y = x.squeeze(self.single[0]), y.squeeze(self.single[1])
        x, y = x.permute(self.orders[0]), y.permute(self.orders[1])
        for dim in self.missing[0]:
            x = x.unsqueeze(dim)
        for dim in self.missing[1]:
            y = y.unsqueeze(dim)
        return self._sum(x, y).permute(self.output).reshape(self.sizes)

    def _sum(self, x: Tensor, y: Tensor) -> Tensor:
        """The product of two tensors of equally many dimensions, summed over some of them."""
        # By hand: `torch.broadcast_shapes` takes longer than a small product.
        shape = [m if n == 1 else n for n, m in zip(x.shape, y.shape, strict=True)]
        elements, summed = prod(shape), self.summed
        dim = next((d for d, n in enumerate(shape) if n > 1 and d not in summed), None)
        if not summed or dim is None or elements <= _PART or x.device.type != "cpu":
            product = x * y
            if all(shape[d] == 1 for d in summed):
                return product.squeeze(summed)  # a sum would read and write it once more
            return product.sum(summed)
        step = max(1, shape[dim] * _PART // elements)
        parts = []
        for start in range(0, shape[dim], step):
            n = min(step, shape[dim] - start)
            some = [z if z.shape[dim] == 1 else z.narrow(dim, start, n) for z in (x, y)]
            sizes = [n if d == dim else size for d, size in enumerate(shape)]
            product = torch.mul(*some, out=allocate(scratch("result"), sizes, x))
            parts.append(product.sum(summed))
        return torch.cat(parts, dim - sum(d < dim for d in summed))


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
        """The einsum of two tensors, in some memory where that can be chosen."""
        (n, rows, _), (_, _, columns) = self.shapes
        out = None if memory is None else allocate(memory, (n, rows, columns), x)
        left = _arranged(x, self.orders[0], self.shapes[0], "first")
        right = _arranged(y, self.orders[1], self.shapes[1], "second")
        return torch.bmm(left, right, out=out).reshape(self.sizes).permute(self.output)


def _order(labels: str, wanted: str) -> tuple[int, ...]:
    """The permutation of ``labels`` that gives ``wanted``."""
    return tuple(labels.index(label) for label in wanted)


def _present(labels: str, wanted: str) -> tuple[int, ...]:
    """The permutation of ``labels`` that gives the order that they have in ``wanted``."""
    return _order(labels, "".join(label for label in wanted if label in labels))


def _missing(labels: str, wanted: str) -> tuple[int, ...]:
    """Where in ``wanted`` there is an index that is not in ``labels``."""
    return tuple(d for d, label in enumerate(wanted) if label not in labels)


def _arranged(
    tensor: Tensor, order: tuple[int, ...], shape: tuple[int, ...], purpose: Purpose
) -> Tensor:
    """An operand as a matrix product takes it: a view of it, or a copy that is valid for now."""
    if repeats(tensor):  # as patches of an image do: copied in its own order
        return _copy(tensor, purpose).permute(order).reshape(shape)
    arranged = tensor.permute(order)
    try:
        return arranged.view(shape)
    except RuntimeError:
        return _copy(arranged, purpose).view(shape)


def _copy(tensor: Tensor, purpose: Purpose) -> Tensor:
    """A contiguous copy."""
    return allocate(scratch(purpose), tensor.shape, tensor).copy_(tensor)


def repeats(tensor: Tensor) -> bool:
    """Whether a view reads some elements of its storage more than once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((n - 1) * stride for n, stride in pairs) + 1 < tensor.numel()
