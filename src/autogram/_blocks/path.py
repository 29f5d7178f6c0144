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
from autogram._blocks.contractions import MatrixProduct, ProductSum, Sum
from autogram._blocks.scratch import Memory

# What moving one element through memory costs, in multiply-adds of a matrix product. Measured on
# two CPU cores with MKL: between 10 and 40, depending on how much of the tensor stays in the cache.
MEMORY_COST = 16


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
        """The result of the einsum, in some memory if it is a matrix product, or many of them."""
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
    if len(terms) == 1 and len(set(inputs)) == len(inputs):
        return Step(positions, Sum.of(inputs, output), volume, elements)
    if len(terms) == 2:
        first, second = terms
        own = [_own(first, second, sizes), _own(second, first, sizes)]
        shared = set(first) & set(second) & set(output)
        if not all(own) and any(sizes[label] > 1 for label in shared):
            product_sum = ProductSum.of(first, second, output, sizes)
            return Step(positions, product_sum, volume, volume)
        if set("".join(own)) <= set(output):
            product = MatrixProduct.of(first, second, output, sizes)
            return Step(positions, product, volume, elements)
    return Step(positions, partial(torch.einsum, equation), volume, elements)


def _own(labels: str, others: str, sizes: Mapping[str, int]) -> str:
    """The indices that one side has alone, without those of size one."""
    return "".join(label for label in labels if label not in others and sizes[label] != 1)
