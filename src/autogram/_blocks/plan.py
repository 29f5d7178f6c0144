"""Plans: products of the rows of blocks, chosen by cost from shapes alone.

Three kinds of products are alike: the Gramian (rows times themselves), the products with the rows
of another Jacobian, and the norms (each row times itself). Each can be computed from explicit rows,
or from factors, pair by pair. An einsum path optimiser for the whole product cannot see
that rows are used more than once, so plans compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from typing import Literal

import torch
from torch import Tensor

from autogram._blocks.block import Block, cross_equation, joined, parsed, reordered
from autogram._blocks.kernels import Kernels, Memory
from autogram._blocks.kernels.paths import OperandShapes, Prices, find_path, sizes_of

ProductKind = Literal["gram", "cross", "norms"]

Signature = tuple[tuple[str, OperandShapes], ...]
"""Equations and shapes of blocks."""

# Each pair of blocks of different form needs its own path, which takes a millisecond to find.
_MOST_BLOCKS_IN_PAIRS = 8

# For products of a block with itself, four ranges of samples leave out three eighths.
_MOST_RANGES = 4


@dataclass(frozen=True)
class Plan:
    """One way to compute products of the rows of one tensor. Calling a plan carries it out.

    Attributes:
        kind: Which products.
        method: ``"rows"`` adds blocks up as explicit rows and multiplies these. ``"factors"``
            contracts every pair of blocks without rows.
        label: The index that is cut if an intermediate result would be too large, or if half
            of the products mirror the others: a dimension of the tensor, or the samples.
        pieces: The number of pieces of that index.
        cost: Multiply-adds, including memory traffic.
        multiplications: Multiply-adds alone.
        elements: The number of elements of the largest intermediate result.
    """

    kind: ProductKind
    method: Literal["rows", "factors"]
    label: str
    pieces: int
    cost: int
    multiplications: int
    elements: int

    def __call__(self, first: Sequence[Block], second: Sequence[Block], kernels: Kernels) -> Tensor:
        """The products, ``(k, b, k', b')``, or the squared norms, ``(k, b)``."""
        if self.method == "rows":
            return self._by_rows(first, second, kernels)
        if self.kind == "cross":
            pairs = [(p, q) for p in first for q in second]
            return reduce(torch.add, [cross(p, q, kernels, pieces=self.pieces) for p, q in pairs])
        if self.kind == "norms" and self.pieces > 1:
            return torch.cat([self._of_sum(part, kernels) for part in self._cut(first)], 1)
        return self._of_sum(first, kernels)

    def _by_rows(self, first: Sequence[Block], second: Sequence[Block], kernels: Kernels) -> Tensor:
        """The products from explicit rows, of one piece after the other."""
        blocks = [*first, *second]
        order = order_of_rows(next((x for x in blocks if x.is_rows), blocks[0]), kernels)
        memory = kernels.scratch if len(blocks) == 1 else None
        parts: list[Tensor] = []
        for piece in [blocks] if self.pieces == 1 else self._cut(blocks):
            ordered = [block.reorder(order) for block in piece]
            total = rows(ordered[: len(first)], kernels, memory)
            if self.kind == "cross":
                other = rows(ordered[len(first) :], kernels)
                dtype = torch.promote_types(total.dtype, other.dtype)
                sides = flat_rows(total).to(dtype), flat_rows(other).to(dtype)
                parts.append(kernels.multiply(*sides).view(total.shape[:2] + other.shape[:2]))
                del other, sides
            else:
                parts.append(products_of_rows(self.kind, total, kernels))
            del total  # before the rows of the next piece are formed
        return joined(parts, 1) if self.kind == "norms" else reduce(torch.add, parts)

    def _of_sum(self, blocks: Sequence[Block], kernels: Kernels) -> Tensor:
        """The products of the sum of some blocks with itself: each pair of two counts twice."""
        products: list[Tensor] = []
        for i, first in enumerate(blocks):
            for second in blocks[:i]:
                product = cross(first, second, kernels, self.kind, self.pieces)
                products += [product, product if self.kind == "norms" else mirrored(product)]
            if self.kind == "norms":
                products.append(cross(first, first, kernels, self.kind))
            else:
                products.append(self._with_itself(first, kernels))
        return reduce(torch.add, products)

    def _with_itself(self, block: Block, kernels: Kernels) -> Tensor:
        """The Gramian of one block. In ranges of samples, one half is the mirror of the other."""
        if self.pieces == 1:
            product = cross(block, block, kernels)
            return product if product.is_contiguous() else mirrored(product)
        block = Block(block.equation, kernels.with_copy(block.operands))
        k, b = block.sizes["k"], block.sizes["b"]
        dtype = kernels.accumulating(*[x.dtype for x in block.operands])
        total = block.operands[0].new_empty(k, b, k, b, dtype=dtype)
        start = 0
        for part in block.chunks("b", self.pieces):
            stop = start + part.sizes["b"]
            product = cross(block.narrow("b", start, b - start), part, kernels)
            total[:, start:, :, start:stop] = product
            total[:, start:stop, :, start:] = mirrored(product)
            start = stop
        return total

    def _cut(self, blocks: Sequence[Block]) -> Iterable[tuple[Block, ...]]:
        position = blocks[0].parameter.find(self.label)
        labels = [self.label if position < 0 else x.parameter[position] for x in blocks]
        cut = [x.chunks(label, self.pieces) for x, label in zip(blocks, labels, strict=True)]
        return zip(*cut, strict=True)


def rows_of_block(block: Block, kernels: Kernels) -> Tensor | None:
    """The rows ``(k, b, *tensor)`` in the order of storage, if the block is explicit rows."""
    of, found = parsed(block.equation), block.operands[0]
    is_there = of.is_rows and of.inputs[0][:2] == "kb" and found.is_contiguous()
    return found if is_there and kernels.multiplied(found.dtype) == found.dtype else None


def flat_rows(rows: Tensor) -> Tensor:
    """Rows ``(k, b, *tensor)`` as a matrix with a row for each loss."""
    k, b, *sizes = rows.shape
    return rows.reshape(k * b, prod(sizes))


def products_of_rows(kind: ProductKind, total: Tensor, kernels: Kernels) -> Tensor:
    """The Gramian ``(k, b, k, b)`` or the squared norms ``(k, b)`` of rows ``(k, b, *tensor)``."""
    (k, b, *_), flat = total.shape, flat_rows(total)
    if kind == "norms":
        dtype = kernels.accumulating(flat.dtype)
        norms: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=dtype)  # in one read
        return norms.square().view(k, b)
    return kernels.gram(flat).view(k, b, k, b)


def rows(blocks: Sequence[Block], kernels: Kernels, memory: Memory | None = None) -> Tensor:
    """The explicit rows, ``(k, b, *tensor)``, in given memory if they are one matrix product."""
    memory = memory if len(blocks) == 1 else None
    return reduce(torch.add, [_rows_of(block, kernels, memory) for block in blocks])


def _rows_of(block: Block, kernels: Kernels, memory: Memory | None) -> Tensor:
    if block.adjoint is not None and block.has_fast_adjoint(kernels):
        return block.adjoint.rows(block.parameter, kernels)
    dtype = block.operands[0].dtype
    if parsed(block.equation).is_in_order and kernels.multiplied(dtype) == dtype:
        return block.operands[0]
    return kernels.rows(block.equation, block.operands, memory)


def order_of_rows(block: Block, kernels: Kernels) -> tuple[int, ...]:
    """The tensor's dimensions in an order in which rows need not be copied."""
    if block.adjoint is not None and block.has_fast_adjoint(kernels):
        return tuple(
            [block.parameter.index(x) for x in block.adjoint.labels if x in block.parameter]
        )
    return parsed(block.equation).order_of_factors


def cross(
    first: Block, second: Block, kernels: Kernels, kind: ProductKind = "cross", pieces: int = 1
) -> Tensor:
    """Inner products of the rows of two blocks of one tensor: all of them, or of equal rows."""
    equation = cross_equation(first.equation, second.equation, is_diagonal=kind == "norms")
    if pieces == 1 or kind == "norms":
        return kernels.einsum(equation, first.operands + second.operands)
    parts = second.chunks("b", pieces)
    return torch.cat([kernels.einsum(equation, first.operands + x.operands) for x in parts], 3)


def mirrored(product: Tensor) -> Tensor:
    """Products ``(k, b, k', b')`` with both sides exchanged."""
    return product.permute(2, 3, 0, 1)


def plans(
    kind: ProductKind, first: Sequence[Block], second: Sequence[Block], kernels: Kernels
) -> tuple[Plan, ...]:
    """All plans that are compared for products of some blocks, the cheapest first."""
    dtype = first[0].operands[0].dtype
    limit, prices = kernels.most_elements(dtype), kernels.prices(dtype)
    signatures = [tuple([(x.equation, x.shapes) for x in of]) for of in (first, second)]
    return _find_plans(kind, *signatures, prices, limit)


def forms_rows(blocks: Sequence[Block], kernels: Kernels) -> bool:
    """Whether the Gramian of some blocks of one tensor is computed from explicit rows."""
    is_fast = any(block.has_fast_adjoint(kernels) for block in blocks)
    return is_fast or plans("gram", blocks, (), kernels)[0].method == "rows"


def gains_by_rows(block: Block, other: Block, kernels: Kernels) -> bool:
    """Whether products with the rows of another block cost less if a block's rows are given.

    The cost of the rows themselves does not count.
    """
    if block.is_rows or block.has_fast_adjoint(kernels):  # these rows are formed in any case
        return not block.is_rows
    labels, sizes = "kb" + block.parameter, block.sizes
    there: Signature = ((f"{labels}->{labels}", (tuple([sizes[label] for label in labels]),)),)
    dtype = block.operands[0].dtype
    limit, prices = kernels.most_elements(dtype), kernels.prices(dtype)
    with_rows = _find_plans("cross", there, ((other.equation, other.shapes),), prices, limit)
    return with_rows[0].cost < plans("cross", [block], [other], kernels)[0].cost


def cost_of_rows(equation: str, shapes: OperandShapes) -> float:
    """Multiply-adds of the explicit rows of a block, from shapes alone."""
    return float(find_path(equation, shapes).multiplications)


def cost_of_products(
    first: str, of_first: OperandShapes, second: str, of_second: OperandShapes
) -> float:
    """Multiply-adds of all inner products of the rows of two blocks, by factors."""
    return float(find_path(cross_equation(first, second), of_first + of_second).multiplications)


@lru_cache(maxsize=4096)
def _find_plans(
    kind: ProductKind, first: Signature, second: Signature, prices: Prices, limit: int
) -> tuple[Plan, ...]:
    """The plans for blocks of some signatures, in pieces where results would exceed the limit."""
    by_rows = _plan_rows(kind, first, second, prices, limit)
    if len(first) + len(second) > _MOST_BLOCKS_IN_PAIRS:
        return (by_rows,)
    by_factors = _plan_factors(kind, first, second, prices, limit)
    return (by_factors, by_rows) if by_factors.cost < by_rows.cost else (by_rows, by_factors)


def _plan_rows(
    kind: ProductKind, first: Signature, second: Signature, prices: Prices, limit: int
) -> Plan:
    blocks = (*first, *second)
    equation, shapes = blocks[0]
    sizes, labels = sizes_of(equation, shapes), parsed(equation).parameter
    m, n = sizes["k"] * sizes["b"], prod(sizes[label] for label in labels)
    others = sizes_of(*second[0]) if second else sizes
    columns = 1 if kind == "norms" else others["k"] * others["b"]
    # All blocks have the tensor's dimensions in the order of existing rows, or else in the order
    # in which a product of the first block's factors leaves them.
    order = parsed(_leading([of for of, _ in blocks])).order_of_factors
    paths = [find_path(reordered(of, order), shapes) for of, shapes in blocks]
    cost = m * n * columns + prices.memory * m * columns + prices.call
    are_there = [len(side) == 1 and parsed(side[0][0]).is_rows for side in (first, second)]
    formed = paths[are_there[0] : len(paths) - are_there[1]]
    cost += sum(path.cost(prices) for path in formed)
    if formed and kind != "cross":  # with factors, the rows of the other are formed on the way, too
        cost += prices.memory * m * n
    work = sum(path.multiplications for path in paths) + m * n * columns
    # A product copies factors for some samples at a time.
    factors = [
        (prod(n for label, n in zip(labels, shape, strict=True) if label != "b"), labels)
        for of, shapes in blocks
        for labels, shape in zip(parsed(of).inputs, shapes, strict=True)
    ]
    of_sample, outer = max(factors)
    largest = max(path.largest for path in paths)
    elements = max(of_sample, largest)
    label = "b"
    if kind != "norms":
        # Cut along an outer dimension of the largest factor, so that parts of it are long runs.
        ordered = [of for of in outer if of in labels] + [of for of in labels if of not in outer]
        enough = [of for of in ordered if sizes[of] * limit >= elements]
        label = next(iter(enough), max(ordered, key=lambda of: sizes[of], default=""))
    pieces = count_pieces(elements, limit, sizes.get(label, 1))
    return Plan(kind, "rows", label, pieces, cost, work, -(-largest // pieces))


def _leading(equations: Sequence[str]) -> str:
    """The equation that orders the rows of several blocks: that of existing rows, if any."""
    return next((of for of in equations if parsed(of).is_rows), equations[0])


def _plan_factors(
    kind: ProductKind, first: Signature, second: Signature, prices: Prices, limit: int
) -> Plan:
    others = [second] * len(first) if second else [first[: i + 1] for i in range(len(first))]
    paths = [
        find_path(cross_equation(p, q, is_diagonal=kind == "norms"), of_p + of_q)
        for (p, of_p), of_second in zip(first, others, strict=True)
        for q, of_q in of_second
    ]
    largest = max(path.largest for path in paths)
    samples = sizes_of(*(second or first)[0])["b"]
    pieces = count_pieces(largest, limit, samples)
    elements = -(-largest // pieces)
    cost = sum(path.cost(prices) for path in paths)
    if kind == "gram" and cost > prices.mirror:
        pieces = max(pieces, min(_MOST_RANGES, samples // prices.thin))
    work = sum(path.multiplications for path in paths)
    return Plan(kind, "factors", "b", pieces, cost, work, elements)


def count_pieces(elements: int, limit: int, size: int) -> int:
    """The number of pieces of an index, so that each piece keeps the limit."""
    return max(1, min(-(-elements // limit), size))
