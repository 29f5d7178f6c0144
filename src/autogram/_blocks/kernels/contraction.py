"""Contractions: einsums as lists of products of one or two tensors, found once for their shapes.

``torch.einsum`` reads its equation at each call, which takes longer than a small contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

import opt_einsum
import torch
from torch import Tensor

from autogram._blocks.kernels.workspace import Purpose

Shapes = tuple[tuple[int, ...], ...]
Copy = Callable[[Tensor, Purpose], Tensor]


@dataclass(frozen=True)
class Step:
    """One product or sum: which operands leave the stack, and what replaces them."""

    positions: tuple[int, ...]
    contract: Matrices | Elementwise | Callable[..., Tensor]
    multiplications: int
    elements: int
    """Elements of the result, and of the product before the summation where it is formed."""


@dataclass(frozen=True)
class Einsum:
    """An einsum as steps, with its cost."""

    steps: tuple[Step, ...]

    def cost(self, price_of_memory: int) -> int:
        """One number to compare plans by, in multiply-adds."""
        return self.multiplications + price_of_memory * sum(step.elements for step in self.steps)

    @property
    def multiplications(self) -> int:
        """Multiply-adds."""
        return sum(step.multiplications for step in self.steps)

    @property
    def largest(self) -> int:
        """Elements of the largest result on the way."""
        return max(step.elements for step in self.steps)


@lru_cache(maxsize=4096)
def find_einsum(equation: str, shapes: Shapes) -> Einsum:
    """The cheapest steps for an einsum, by number of operations."""
    sizes = sizes_of(equation, shapes)
    if len(shapes) <= 2:
        return Einsum((_step((0,) * len(shapes), equation, sizes),))
    _, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
    return Einsum(tuple(_step(tuple(found[0]), found[2], sizes) for found in info.contraction_list))


@lru_cache(maxsize=4096)
def sizes_of(equation: str, shapes: Shapes) -> Mapping[str, int]:
    """The size of every index of an einsum."""
    pairs = zip(equation.split("->")[0].split(","), shapes, strict=True)
    return {label: n for labels, shape in pairs for label, n in zip(labels, shape, strict=True)}


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
    if len(terms) == 1 and len(set(inputs)) == len(inputs):
        return Step(positions, partial(_sum, *_summation(inputs, output)), volume, elements)
    if len(terms) == 2:
        first, second = terms
        own = [_own(first, second, sizes), _own(second, first, sizes)]
        shared = set(first) & set(second) & set(output)
        if not all(own) and any(sizes[label] > 1 for label in shared):
            return Step(positions, Elementwise.of(first, second, output, sizes), volume, volume)
        if set("".join(own)) <= set(output):
            return Step(positions, Matrices.of(first, second, output, sizes), volume, elements)
    return Step(positions, partial(torch.einsum, equation), volume, elements)


def _own(labels: str, others: str, sizes: Mapping[str, int]) -> str:
    """The indices that one side has alone, without those of size one."""
    return "".join(label for label in labels if label not in others and sizes[label] != 1)


def _summation(labels: str, output: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions that are summed over, and the order of those that are left."""
    summed = tuple(dim for dim, label in enumerate(labels) if label not in output)
    return summed, _order("".join(label for label in labels if label in output), output)


def _sum(summed: tuple[int, ...], order: tuple[int, ...], x: Tensor) -> Tensor:
    """An einsum of one tensor."""
    return (x.sum(summed) if summed else x).permute(order)


def _order(labels: str, wanted: str) -> tuple[int, ...]:
    """The permutation of ``labels`` that gives ``wanted``."""
    return tuple(labels.index(label) for label in wanted)


@dataclass(frozen=True)
class Elementwise:
    """An einsum of two operands as a broadcast product and a sum, in the order of the larger."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Those of the operands without dimensions of size one."""
    orders: tuple[tuple[int, ...], tuple[int, ...]]
    missing: tuple[tuple[int, ...], tuple[int, ...]]
    """Dimensions of the product that the first and the second operand do not have."""
    summed: tuple[int, ...]
    output: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of the result."""

    @classmethod
    def of(cls, first: str, second: str, output: str, sizes: Mapping[str, int]) -> Elementwise:
        """The product that an equation asks for."""
        shape = tuple(sizes[label] for label in output)
        first, second, output = (
            "".join(label for label in labels if sizes[label] != 1)
            for labels in (first, second, output)
        )
        shapes = tuple(tuple(sizes[label] for label in labels) for labels in (first, second))
        is_larger = prod(shapes[0]) >= prod(shapes[1])
        product = "".join(dict.fromkeys(first + second if is_larger else second + first))
        orders = (_order(x, "".join(y for y in product if y in x)) for x in (first, second))
        missing = (
            tuple(d for d, label in enumerate(product) if label not in x) for x in (first, second)
        )
        summed, order = _summation(product, output)
        return cls((shapes[0], shapes[1]), _pair(orders), _pair(missing), summed, order, shape)

    def aligned(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The operands with the dimensions of the product."""
        x = x.reshape(self.shapes[0]).permute(self.orders[0])
        y = y.reshape(self.shapes[1]).permute(self.orders[1])
        for dim in self.missing[0]:
            x = x.unsqueeze(dim)
        for dim in self.missing[1]:
            y = y.unsqueeze(dim)
        return x, y

    def product_sum(self, x: Tensor, y: Tensor) -> Tensor:
        """The product of aligned operands, summed."""
        return (x * y).sum(self.summed) if self.summed else x * y

    def restored(self, total: Tensor) -> Tensor:
        """The result in the order and the shape that the equation asks for."""
        return total.permute(self.output).reshape(self.sizes)


@dataclass(frozen=True)
class Matrices:
    """An einsum of two operands as one batched matrix product."""

    orders: tuple[tuple[int, ...], tuple[int, ...]]
    """Permutations to (batch, own, summed) and to (batch, summed, own)."""
    shapes: tuple[tuple[int, int, int], tuple[int, int, int]]
    sizes: tuple[int, ...]
    """Of the product's indices: batch, those of the first, those of the second."""
    output: tuple[int, ...]

    @classmethod
    def of(cls, first: str, second: str, output: str, sizes: Mapping[str, int]) -> Matrices:
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

    def arranged(self, x: Tensor, y: Tensor, copy: Copy | None = None) -> tuple[Tensor, Tensor]:
        """The operands as a batched matrix product takes them: views, or copies."""
        left = _arranged(x, self.orders[0], self.shapes[0], "first", copy)
        return left, _arranged(y, self.orders[1], self.shapes[1], "second", copy)

    def restored(self, product: Tensor) -> Tensor:
        """The result in the order and the shape that the equation asks for."""
        return product.reshape(self.sizes).permute(self.output)


def _arranged(
    tensor: Tensor,
    order: tuple[int, ...],
    shape: tuple[int, ...],
    purpose: Purpose,
    copy: Copy | None,
) -> Tensor:
    """An operand as a matrix product takes it: a view, or a copy in the order of the operand."""
    arranged = tensor.permute(order)
    if copy is None:
        return arranged.reshape(shape)
    try:
        return arranged.view(shape)
    except RuntimeError:
        if repeats(tensor):  # as patches of an image do, which are copied in long runs so
            return copy(tensor, purpose).permute(order).reshape(shape)
        return copy(arranged, purpose).view(shape)


def repeats(tensor: Tensor) -> bool:
    """Whether a view reads some elements of its storage more than once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((n - 1) * stride for n, stride in pairs) + 1 < tensor.numel()


def _pair(
    found: Iterable[tuple[int, ...]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two tuples of dimensions, as a pair."""
    first, second = found
    return first, second
