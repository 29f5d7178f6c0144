"""Products of blocks with vectors, norms of their rows, and products of two Jacobians.

All blocks in one argument belong to one tensor, and their sum is meant. ``limit`` is the number of
elements that one intermediate result may have.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, reduce
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from autogram._blocks.block import Block, Shapes, cross_equation, sizes_of, unused_labels
from autogram._blocks.gram import cross, merge, rows
from autogram._blocks.path import einsum, find_path
from autogram._blocks.plan import Signature, count_parts, limit_on, signature_of


def weighted_sum(blocks: list[Block], weights: Tensor, limit: int) -> Tensor:
    """Sums of rows: J^T w.

    The weights go to the cotangents before anything is summed over, where that is cheaper, so that
    a linear layer costs what the gradient of its weight costs in an ordinary backward pass (Bu et
    al. 2022, arXiv:2210.00038).

    Args:
        blocks: Some blocks.
        weights: ``(s, k, b)``.
        limit: See above.

    Returns:
        ``(s, *tensor)``.
    """
    if len(weights) > 1:
        return _weighted_sum(blocks, weights, limit)
    adjoints = [block.adjoint for block in blocks if block.adjoint is not None]
    parts = [adjoint(weights[0]).unsqueeze(0) for adjoint in adjoints]
    if len(adjoints) < len(blocks):
        others = [block for block in blocks if block.adjoint is None]
        parts.append(_weighted_sum(others, weights, limit))
    return reduce(torch.add, parts)


def _weighted_sum(blocks: list[Block], weights: Tensor, limit: int) -> Tensor:
    """Weighted sums by an einsum."""
    parts: list[Tensor] = []
    for block in merge(blocks):
        if len(weights) == 1 and len(block.operands) == 2 and {"k", "b"} <= {*block.inputs[0]}:
            parts.append(_gradient(block, weights[0], limit).unsqueeze(0))
            continue
        inputs, output = block.equation.split("->")
        s = next(unused_labels(block.equation))
        equation = f"{s}kb,{inputs}->{s}{output[2:]}"
        parts.extend(_by_samples(equation, (weights, *block.operands), limit))
    return reduce(torch.add, parts)


def _gradient(block: Block, weights: Tensor, limit: int) -> Tensor:
    """One weighted sum of the rows of a cotangent and a factor, in the tensor's own order.

    The product of the two has the indices of its first operand outside. In another order than the
    tensor's, it would have to be copied.
    """
    (first, second), output = block.inputs, block.parameter
    kept = first if "k" in second else first.replace("k", "")
    outermost = next((label for label in output if (label in kept) != (label in second)), "")
    is_swapped = outermost != "" and outermost in second
    equation = f"{second},{kept}->{output}" if is_swapped else f"{kept},{second}->{output}"
    largest = max(prod(shape) for shape in block.shapes)
    count = count_parts(
        largest, limit_on(weights.device.type, weights.dtype, limit), block.sizes["b"]
    )
    whole = Block(f"kb,{block.equation}", (weights, *block.operands))
    total: list[Tensor] = []
    for w, cotangent, factor in (part.operands for part in whole.chunks("b", count)):
        weighted = einsum(f"kb,{first}->{kept}", (w, cotangent))
        pair = (factor, weighted) if is_swapped else (weighted, factor)
        total.append(einsum(equation, pair))
    return reduce(torch.add, total)


def directional(blocks: list[Block], direction: Tensor, limit: int) -> Tensor:
    """Products of the rows with one direction: J v.

    Args:
        blocks: Some blocks.
        direction: Of the tensor's shape.
        limit: See above.

    Returns:
        ``(k, b)``.
    """
    total = []
    for block in merge(blocks):
        inputs, output = block.equation.split("->")
        parts = _by_samples(f"{inputs},{output[2:]}->kb", (*block.operands, direction), limit)
        total.append(torch.cat(list(parts), 1))
    return reduce(torch.add, total)


def square_norms(blocks: list[Block], limit: int) -> Tensor:
    """Squared Euclidean norms of the rows, ``(k, b)``.

    By rows or by factors, whatever is cheaper: mixed ghost clipping (Bu et al. 2022,
    arXiv:2205.10683).
    """
    blocks = merge(blocks)
    signature = signature_of(blocks)
    limit = limit_on(blocks[0].operands[0].device.type, blocks[0].dtype, limit)
    by_rows, chunks = _plan_norms(signature, limit)
    parts = []
    for some in zip(*(block.chunks("b", chunks) for block in blocks), strict=True):
        if by_rows:
            found = rows(some)
            parts.append(found.reshape(*found.shape[:2], -1).square().sum(2))
        else:
            total = reduce(torch.add, (row_products(block, block) for block in some))
            for first, second in combinations(some, 2):
                total = total + 2 * row_products(first, second)
            parts.append(total)
    return torch.cat(parts, 1)


def row_products(first: Block, second: Block) -> Tensor:
    """Inner products of each row with the same row of another block, ``(k, b)``."""
    equation = cross_equation(first.equation, second.equation, is_diagonal=True)
    return einsum(equation, first.operands + second.operands)


def cross_gram(first: list[Block], second: list[Block], limit: int) -> Tensor:
    """Inner products of the rows of two Jacobians for one tensor, ``(k, b, k', b')``."""
    first, second = merge(first), merge(second)
    limit = limit_on(first[0].operands[0].device.type, first[0].dtype, limit)
    position, chunks = _plan_cross(signature_of(first), signature_of(second), limit)
    if position is None:
        pairs = (cross(p, q, chunks) for p in first for q in second)
        return reduce(torch.add, pairs)
    cut = [block.chunks(block.parameter[position], chunks) for block in (*first, *second)]
    total: list[Tensor] = []
    for parts in zip(*cut, strict=True):
        left, right = rows(parts[: len(first)]), rows(parts[len(first) :])
        total.append(left.flatten(0, 1).flatten(1) @ right.flatten(0, 1).flatten(1).mT)
    sizes = [block.sizes[label] for block in (first[0], second[0]) for label in "kb"]
    return reduce(torch.add, total).view(sizes)


@lru_cache(maxsize=4096)
def _plan_norms(signature: Signature, limit: int) -> tuple[bool, int]:
    """Whether to form rows, and into how many ranges of samples to cut the blocks."""
    paths = [find_path(equation, shapes) for equation, shapes in signature]
    pairs = [
        find_path(cross_equation(p, q, is_diagonal=True), of_p + of_q)
        for i, (p, of_p) in enumerate(signature)
        for q, of_q in signature[: i + 1]
    ]
    sizes = sizes_of(*signature[0])
    elements = prod(sizes[label] for label in signature[0][0].split("->")[1])
    by_rows = sum(path.cost for path in paths) + elements <= sum(path.cost for path in pairs)
    largest = max(path.largest for path in (paths if by_rows else pairs))
    return by_rows, count_parts(largest, limit, sizes["b"])


@lru_cache(maxsize=4096)
def _plan_cross(first: Signature, second: Signature, limit: int) -> tuple[int | None, int]:
    """How to multiply two Jacobians.

    Returns:
        The dimension of the tensor that is cut if rows are formed, or ``None`` to contract factors
        and cut the samples of the second; and the number of parts.
    """
    paths = [find_path(equation, shapes) for equation, shapes in (*first, *second)]
    pairs = [
        find_path(cross_equation(p, q), of_p + of_q) for p, of_p in first for q, of_q in second
    ]
    sizes, others = sizes_of(*first[0]), sizes_of(*second[0])
    labels = first[0][0].split("->")[1][2:]
    n = prod(sizes[label] for label in labels)
    products = n * prod(of[label] for of in (sizes, others) for label in "kb")
    if not labels or sum(path.cost for path in pairs) < sum(path.cost for path in paths) + products:
        return None, count_parts(max(path.largest for path in pairs), limit, others["b"])
    position = max(range(len(labels)), key=lambda d: sizes[labels[d]])
    largest = max(path.largest for path in paths)
    return position, count_parts(largest, limit, sizes[labels[position]])


def _by_samples(equation: str, operands: tuple[Tensor, ...], limit: int) -> Iterator[Tensor]:
    """An einsum over samples, some of them at a time."""
    limit = limit_on(operands[0].device.type, operands[0].dtype, limit)
    whole = Block(equation, operands)
    for part in whole.chunks("b", _count_parts(equation, whole.shapes, limit)):
        yield einsum(equation, part.operands)


@lru_cache(maxsize=4096)
def _count_parts(equation: str, shapes: Shapes, limit: int) -> int:
    """Into how many ranges to cut the samples of an einsum."""
    # Operands count too: patches of an image are a view that a matrix product must copy.
    largest = max(find_path(equation, shapes).largest, *(prod(shape) for shape in shapes))
    return count_parts(largest, limit, sizes_of(equation, shapes)["b"])
