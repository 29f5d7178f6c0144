"""Rows of blocks, and their products with vectors, with themselves and with other rows.

All blocks in one argument belong to one tensor, and their sum is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from autogram._blocks.block import Block, cross_equation, parsed, unused_labels
from autogram._blocks.kernels import Kernels, Memory
from autogram._blocks.kernels.contraction import Shapes, find_einsum, sizes_of
from autogram._blocks.plan import Signature, count_pieces, cross, plans, signature_of


def gram(blocks: Sequence[Block], kernels: Kernels) -> Tensor:
    """The Gramian of the rows, ``(k, b, k, b)``."""
    blocks = merge(blocks)
    return plans(blocks, kernels)[0](blocks, kernels)


def rows(blocks: Sequence[Block], kernels: Kernels) -> Tensor:
    """The explicit rows, ``(k, b, *tensor)``."""
    return reduce(torch.add, [kernels.einsum(x.equation, x.operands) for x in blocks])


def explicit(blocks: Sequence[Block], kernels: Kernels, memory: Memory | None = None) -> Block:
    """A block of explicit rows, in the order of the factors, which takes no copy.

    Args:
        blocks: Some blocks.
        kernels: How to contract them.
        memory: Where to put the rows if they are a matrix product.
    """
    first = parsed(blocks[0].equation)
    order = first.order_of_factors
    if len(blocks) == 1:
        found = kernels.einsum(first.reordered(order), blocks[0].operands, memory)
    else:
        found = rows([block.reorder(order) for block in blocks], kernels)
    labels = "".join(first.parameter[d] for d in order)
    return Block(f"kb{labels}->kb{first.parameter}", (found.contiguous(),))


def weighted_sum(blocks: Sequence[Block], weights: Tensor, kernels: Kernels) -> Tensor:
    """Sums of rows: J^T w.

    The weights go to the cotangents before anything is summed over, where that is cheaper, so that
    a linear layer costs what the gradient of its weight costs in an ordinary backward pass (Bu et
    al. 2022, arXiv:2210.00038).

    Args:
        blocks: Some blocks.
        weights: ``(s, k, b)``.
        kernels: How to contract them.

    Returns:
        ``(s, *tensor)``.
    """
    parts: list[Tensor] = []
    others = list(blocks)
    if len(weights) == 1:
        adjoints = [block.adjoint for block in blocks if block.adjoint is not None]
        parts = [adjoint(weights[0]).unsqueeze(0) for adjoint in adjoints]
        others = [block for block in blocks if block.adjoint is None]
    for block in merge(others):
        if len(weights) == 1 and len(block.operands) == 2 and {"k", "b"} <= {*block.inputs[0]}:
            parts.append(_gradient(block, weights[0], kernels).unsqueeze(0))
        else:
            inputs, output = block.equation.split("->")
            s = next(unused_labels(block.equation))
            equation = f"{s}kb,{inputs}->{s}{output[2:]}"
            parts.extend(_by_samples(equation, (weights, *block.operands), kernels))
    return reduce(torch.add, parts)


def _gradient(block: Block, weights: Tensor, kernels: Kernels) -> Tensor:
    """One weighted sum of the rows of a cotangent and a factor, in the order of the tensor."""
    weight, pair, is_swapped = _equations_of_gradient(block.equation)
    largest = max([prod(shape) for shape in block.shapes])
    pieces = count_pieces(largest, kernels.most_elements(weights.dtype), block.sizes["b"])
    whole = Block(f"kb,{block.equation}", (weights, *block.operands))
    total: list[Tensor] = []
    for w, cotangent, factor in (part.operands for part in whole.chunks("b", pieces)):
        weighted = kernels.einsum(weight, (w, cotangent))
        operands = (factor, weighted) if is_swapped else (weighted, factor)
        total.append(kernels.einsum(pair, operands))
    return reduce(torch.add, total)


@lru_cache(maxsize=4096)
def _equations_of_gradient(equation: str) -> tuple[str, str, bool]:
    """The equations that weight a cotangent and multiply it by a factor, and whether to swap both.

    The product of the two has the indices of its first operand outside. In another order than the
    tensor's, the product would have to be copied.
    """
    (first, second), output = parsed(equation).inputs, parsed(equation).parameter
    kept = first if "k" in second else first.replace("k", "")
    outermost = next((label for label in output if (label in kept) != (label in second)), "")
    is_swapped = outermost != "" and outermost in second
    pair = f"{second},{kept}->{output}" if is_swapped else f"{kept},{second}->{output}"
    return f"kb,{first}->{kept}", pair, is_swapped


def directional(blocks: Sequence[Block], direction: Tensor, kernels: Kernels) -> Tensor:
    """Products of the rows with a direction of the tensor's shape: J v, ``(k, b)``."""
    total = []
    for block in merge(blocks):
        inputs, output = block.equation.split("->")
        operands = (*block.operands, direction)
        parts = _by_samples(f"{inputs},{output[2:]}->kb", operands, kernels)
        total.append(torch.cat(list(parts), 1))
    return reduce(torch.add, total)


def square_norms(blocks: Sequence[Block], kernels: Kernels) -> Tensor:
    """Squared Euclidean norms of the rows, ``(k, b)``.

    By rows or by factors, whatever is cheaper: mixed ghost clipping (Bu et al. 2022,
    arXiv:2205.10683).
    """
    blocks = merge(blocks)
    limit = kernels.most_elements(blocks[0].operands[0].dtype)
    by_rows, pieces = _plan_norms(signature_of(blocks), kernels.price_of_memory, limit)
    parts = []
    for some in zip(*(block.chunks("b", pieces) for block in blocks), strict=True):
        if by_rows:
            found = rows(some, kernels)
            flat = found.reshape(*found.shape[:2], -1)
            parts.append(torch.linalg.vector_norm(flat, dim=2).square())
        else:
            total = reduce(torch.add, [row_products(block, block, kernels) for block in some])
            for first, second in combinations(some, 2):
                total = total + 2 * row_products(first, second, kernels)
            parts.append(total)
    return torch.cat(parts, 1)


def row_products(first: Block, second: Block, kernels: Kernels) -> Tensor:
    """Inner products of each row with the same row of another block, ``(k, b)``."""
    equation = cross_equation(first.equation, second.equation, is_diagonal=True)
    return kernels.einsum(equation, first.operands + second.operands)


def cross_gram(first: Sequence[Block], second: Sequence[Block], kernels: Kernels) -> Tensor:
    """Inner products of the rows of two Jacobians for one tensor, ``(k, b, k', b')``."""
    first, second = merge(first), merge(second)
    limit = kernels.most_elements(first[0].operands[0].dtype)
    signatures = signature_of(first), signature_of(second)
    dim, pieces = _plan_cross(*signatures, kernels.price_of_memory, limit)
    if dim is None:
        return reduce(torch.add, [cross(p, q, kernels, pieces) for p in first for q in second])
    cut = [block.chunks(block.parameter[dim], pieces) for block in (*first, *second)]
    total: list[Tensor] = []
    for parts in zip(*cut, strict=True):
        left, right = rows(parts[: len(first)], kernels), rows(parts[len(first) :], kernels)
        dtype = torch.promote_types(left.dtype, right.dtype)
        matrices = (x.flatten(0, 1).flatten(1).to(dtype) for x in (left, right))
        total.append(kernels.multiply(*matrices))
    sizes = [block.sizes[label] for block in (first[0], second[0]) for label in "kb"]
    return reduce(torch.add, total).view(sizes)


@lru_cache(maxsize=4096)
def _plan_norms(signature: Signature, price_of_memory: int, limit: int) -> tuple[bool, int]:
    """Whether to form rows, and into how many ranges of samples to cut the blocks."""
    paths = [find_einsum(equation, shapes) for equation, shapes in signature]
    pairs = [
        find_einsum(cross_equation(p, q, is_diagonal=True), of_p + of_q)
        for i, (p, of_p) in enumerate(signature)
        for q, of_q in signature[: i + 1]
    ]
    sizes = sizes_of(*signature[0])
    elements = prod(sizes[label] for label in signature[0][0].split("->")[1])
    cost, cost_of_pairs = (sum(x.cost(price_of_memory) for x in of) for of in (paths, pairs))
    by_rows = cost + elements <= cost_of_pairs
    largest = max(path.largest for path in (paths if by_rows else pairs))
    return by_rows, count_pieces(largest, limit, sizes["b"])


@lru_cache(maxsize=4096)
def _plan_cross(
    first: Signature, second: Signature, price_of_memory: int, limit: int
) -> tuple[int | None, int]:
    """How to multiply two Jacobians.

    Returns:
        The dimension of the tensor that is cut if rows are formed, or ``None`` to contract factors
        and cut the samples of the second; and the number of pieces.
    """
    paths = [find_einsum(equation, shapes) for equation, shapes in (*first, *second)]
    pairs = [
        find_einsum(cross_equation(p, q), of_p + of_q) for p, of_p in first for q, of_q in second
    ]
    sizes, others = sizes_of(*first[0]), sizes_of(*second[0])
    labels = parsed(first[0][0]).parameter
    n = prod(sizes[label] for label in labels)
    products = n * prod(of[label] for of in (sizes, others) for label in "kb")
    cost, cost_of_pairs = (sum(x.cost(price_of_memory) for x in of) for of in (paths, pairs))
    if not labels or cost_of_pairs < cost + products:
        return None, count_pieces(max(path.largest for path in pairs), limit, others["b"])
    dim = max(range(len(labels)), key=lambda d: sizes[labels[d]])
    return dim, count_pieces(max(path.largest for path in paths), limit, sizes[labels[dim]])


def _by_samples(equation: str, operands: tuple[Tensor, ...], kernels: Kernels) -> Iterator[Tensor]:
    """An einsum over samples, some of them at a time."""
    whole = Block(equation, operands)
    limit = kernels.most_elements(operands[0].dtype)
    # Operands count too: patches of an image are a view that a matrix product must copy.
    shapes = whole.shapes
    largest = max(find_einsum(equation, shapes).largest, *[prod(shape) for shape in shapes])
    for part in whole.chunks("b", count_pieces(largest, limit, whole.sizes["b"])):
        yield kernels.einsum(equation, part.operands)


def merge(blocks: Sequence[Block]) -> list[Block]:
    """Blocks of equal equations and shapes made one, along an index that is summed over.

    A layer that is applied many times (a recurrent loop) then costs one contraction, in which the
    planner sees the applications as positions.
    """
    if len(blocks) == 1:
        return list(blocks)
    groups: dict[tuple[str, Shapes], list[Block]] = {}
    for block in blocks:
        groups.setdefault((block.equation, _shapes_beside_positions(block)), []).append(block)
    return [_join(group) if len(group) > 1 else group[0] for group in groups.values()]


def _shapes_beside_positions(block: Block) -> Shapes:
    """The shapes of a block, less what may differ between blocks that are joined."""
    label = _position(block.equation)
    pairs = zip(block.inputs, block.shapes, strict=True)
    return tuple(
        tuple(0 if of == label else n for of, n in zip(labels, shape, strict=True))
        for labels, shape in pairs
    )


def _position(equation: str) -> str | None:
    """An index that every operand has and that is summed over, if there is one."""
    found = parsed(equation)
    common = set.intersection(*(set(of) for of in found.inputs)) - set(f"kb{found.parameter}")
    return min(common, default=None)


def _join(blocks: Sequence[Block]) -> Block:
    """One block for several of equal form."""
    inputs, output = blocks[0].equation.split("->")
    operands = list(zip(*(block.operands for block in blocks), strict=True))
    label = _position(blocks[0].equation)
    if label is not None:
        dims = [of.index(label) for of in inputs.split(",")]
        joined = (torch.cat(uses, dim) for uses, dim in zip(operands, dims, strict=True))
        return Block(blocks[0].equation, tuple(joined))
    label = next(unused_labels(inputs))
    equation = ",".join(label + of for of in inputs.split(","))
    return Block(f"{equation}->{output}", tuple(torch.stack(uses) for uses in operands))
