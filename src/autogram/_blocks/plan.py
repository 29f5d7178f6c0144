"""Plans: how the Gramian of some blocks is computed, chosen by cost from their shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from autogram._blocks.block import Block, cross_equation, parsed
from autogram._blocks.kernels import Kernels
from autogram._blocks.kernels.contraction import Einsum, Shapes, find_einsum, sizes_of

# Which method is cheaper does not depend on the limit.
ANY_LIMIT = 2**62

# Each pair of blocks of different form needs a path of its own, which takes a millisecond to find.
_MOST_BLOCKS_IN_PAIRS = 8

Signature = tuple[tuple[str, Shapes], ...]
"""The equations and shapes of some blocks: all that plans depend on."""


@dataclass(frozen=True)
class Plan:
    """One way to the Gramian of some blocks of one tensor, which can be carried out.

    Attributes:
        label: The index that is cut, where the result on the way would be too large.
        pieces: Into how many pieces it is cut.
        cost: In multiply-adds, memory traffic included.
        multiplications: Multiply-adds alone.
        elements: Those of the largest result on the way.
        einsums: What is computed of uncut blocks.
    """

    method: ClassVar[Literal["rows", "factors"]]
    label: str
    pieces: int
    cost: int
    multiplications: int
    elements: int
    einsums: tuple[Einsum, ...]

    def __call__(self, blocks: Sequence[Block], kernels: Kernels) -> Tensor:
        """The Gramian ``(k, b, k, b)`` of blocks of the shapes that the plan was made for."""
        raise NotImplementedError


@dataclass(frozen=True)
class ByRows(Plan):
    """Adds the blocks up as explicit rows, and multiplies these by themselves.

    The index that is cut is a dimension of the tensor.
    """

    method = "rows"

    def __call__(self, blocks: Sequence[Block], kernels: Kernels) -> Tensor:
        """The Gramian."""
        are_there = len(blocks) == 1 and blocks[0].is_rows and blocks[0].operands[0].is_contiguous()
        if self.pieces == 1 or are_there:
            return self._gram(blocks, self.einsums, kernels)
        first = blocks[0].equation
        position = blocks[0].parameter.index(self.label)
        cut = [block.chunks(block.parameter[position], self.pieces) for block in blocks]
        total: Tensor | None = None
        for part in zip(*cut, strict=True):
            einsums = [find_einsum(_in_order(x.equation, first), x.shapes) for x in part]
            gram = self._gram(part, einsums, kernels)
            total = gram if total is None else total + gram
        assert total is not None
        return total

    def _gram(self, blocks: Sequence[Block], einsums: Sequence[Einsum], kernels: Kernels) -> Tensor:
        """The Gramian of some rows, which are read once."""
        memory = kernels.scratch_rows if len(blocks) == 1 else None
        rows = reduce(
            torch.add,
            [
                kernels.run(einsum, block.operands, memory)
                for einsum, block in zip(einsums, blocks, strict=True)
            ],
        )
        k, b = rows.shape[:2]
        return kernels.gram(rows.reshape(k * b, -1)).view(k, b, k, b)


@dataclass(frozen=True)
class ByFactors(Plan):
    """Contracts every pair of blocks without rows.

    The index that is cut is the sample of one side.
    """

    method = "factors"

    def __call__(self, blocks: Sequence[Block], kernels: Kernels) -> Tensor:
        """The Gramian."""
        total: Tensor | None = None
        einsums = iter(self.einsums)
        for i, first in enumerate(blocks):
            for second in blocks[: i + 1]:
                einsum = next(einsums)
                if first is second:
                    product = self._with_itself(first, einsum, kernels)
                else:
                    product = cross(first, second, kernels, self.pieces)
                    product = product + product.permute(2, 3, 0, 1)
                total = product if total is None else total + product
        assert total is not None
        return total

    def _with_itself(self, block: Block, einsum: Einsum, kernels: Kernels) -> Tensor:
        """The Gramian of one block, of which one half is the mirror of the other."""
        sizes = block.sizes
        pieces = max(self.pieces, kernels.parts_to_mirror(self.cost, sizes["b"]))
        if pieces == 1:
            product = kernels.run(einsum, block.operands * 2)
            return product if product.is_contiguous() else product.permute(2, 3, 0, 1)
        block = Block(block.equation, kernels.with_copy(block.operands))
        k, b = sizes["k"], sizes["b"]
        total = block.operands[0].new_empty(
            k, b, k, b, dtype=kernels.accumulating(*[x.dtype for x in block.operands])
        )
        start = 0
        for part in block.chunks("b", pieces):
            stop = start + part.sizes["b"]
            product = cross(block.narrow("b", start, b - start), part, kernels)
            total[:, start:, :, start:stop] = product
            total[:, start:stop, :, start:] = product.permute(2, 3, 0, 1)
            start = stop
        return total


def cross(first: Block, second: Block, kernels: Kernels, pieces: int = 1) -> Tensor:
    """Inner products of the rows of two blocks of one tensor, ``(k, b, k', b')``."""
    equation = cross_equation(first.equation, second.equation)
    parts = second.chunks("b", pieces)
    found = [kernels.einsum(equation, first.operands + part.operands) for part in parts]
    return torch.cat(found, 3) if pieces > 1 else found[0]


def plans(blocks: Sequence[Block], kernels: Kernels, limit: int | None = None) -> tuple[Plan, ...]:
    """All ways that are considered for some blocks, the cheapest first."""
    if limit is None:
        limit = kernels.most_elements(blocks[0].operands[0].dtype)
    return _find_plans(signature_of(blocks), kernels.price_of_memory, limit)


def forms_rows(blocks: Sequence[Block], kernels: Kernels) -> bool:
    """Whether the Gramian of some blocks of one tensor is computed from explicit rows."""
    return plans(blocks, kernels, ANY_LIMIT)[0].method == "rows"


def signature_of(blocks: Sequence[Block]) -> Signature:
    """What plans depend on."""
    return tuple([(block.equation, block.shapes) for block in blocks])


@lru_cache(maxsize=4096)
def _find_plans(signature: Signature, price_of_memory: int, limit: int) -> tuple[Plan, ...]:
    """The ways for blocks of a signature, cut into pieces where results exceed the limit.

    An einsum path optimiser asked for the whole product cannot see that the rows are used twice,
    so that rows and factors are compared here.
    """
    by_rows = _plan_rows(signature, price_of_memory, limit)
    if len(signature) > _MOST_BLOCKS_IN_PAIRS:
        return (by_rows,)
    by_factors = _plan_factors(signature, price_of_memory, limit)
    return (by_factors, by_rows) if by_factors.cost < by_rows.cost else (by_rows, by_factors)


def _plan_rows(signature: Signature, price_of_memory: int, limit: int) -> Plan:
    """The plan that forms rows."""
    sizes, labels = sizes_of(*signature[0]), parsed(signature[0][0]).parameter
    m = sizes["k"] * sizes["b"]
    n = prod(sizes[label] for label in labels)
    first = signature[0][0]
    paths = [find_einsum(_in_order(equation, first), shapes) for equation, shapes in signature]
    cost = m * m * n + price_of_memory * m * m
    if not (len(signature) == 1 and parsed(signature[0][0]).is_rows):  # else rows are there
        cost += sum(path.cost(price_of_memory) for path in paths) + price_of_memory * m * n
    work = sum(path.multiplications for path in paths) + m * m * n
    factors = [
        factor for of, shapes in signature for factor in zip(shapes, parsed(of).inputs, strict=True)
    ]
    shape, outer = max(factors, key=lambda factor: prod(factor[0]))
    largest = max(path.largest for path in paths)
    elements = max(prod(shape), largest)
    # Cut along an outer dimension of the largest factor, so that parts of it are long runs.
    order = [label for label in outer if label in labels]
    order += [label for label in labels if label not in outer]
    enough = [label for label in order if sizes[label] * limit >= elements]
    label = next(iter(enough), max(order, key=lambda label: sizes[label], default=""))
    pieces = count_pieces(elements, limit, sizes.get(label, 1))
    return ByRows(label, pieces, cost, work, -(-largest // pieces), tuple(paths))


def _plan_factors(signature: Signature, price_of_memory: int, limit: int) -> Plan:
    """The plan that contracts every pair of blocks without rows."""
    paths = [
        find_einsum(cross_equation(p, q), of_p + of_q)
        for i, (p, of_p) in enumerate(signature)
        for q, of_q in signature[: i + 1]
    ]
    elements = max(path.largest for path in paths)
    pieces = count_pieces(elements, limit, sizes_of(*signature[0])["b"])
    cost = sum(path.cost(price_of_memory) for path in paths)
    work = sum(path.multiplications for path in paths)
    return ByFactors("b", pieces, cost, work, -(-elements // pieces), tuple(paths))


def count_pieces(elements: int, limit: int, size: int) -> int:
    """Into how many pieces to cut an index of some size, so that each piece keeps the limit."""
    return max(1, min(-(-elements // limit), size))


def _in_order(equation: str, first: str) -> str:
    """The equation of rows with dimensions in the order of the first block's factors.

    A matrix product leaves them in this order. Inner products of rows do not depend on it.
    """
    return parsed(equation).reordered(parsed(first).order_of_factors)
