"""Gramians of blocks, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce

import torch
from torch import Tensor

from autogram._blocks.block import Block, Shapes, cross_equation, unused_labels
from autogram._blocks.contractions import repeats
from autogram._blocks.path import einsum
from autogram._blocks.plan import Plan, find_plan, limit_on, order_of_rows, signature_of
from autogram._blocks.scratch import Memory, allocate, fits, scratch

# With fewer samples on a side, the products are too thin to gain from leaving out their mirror.
_FEWEST_SAMPLES = 16
_WORTH_MIRRORING = 2**28

# A matrix product with few rows and columns and a long sum leaves all but one thread with little
# to do. Cut into parts of the sum, it took three quarters of the time on two threads.
_WORTH_SPLITTING = 2**19
_PARTS = 4


def gram(blocks: list[Block], limit: int) -> Tensor:
    """The Gramian of the sum of some blocks of one tensor.

    Args:
        blocks: Blocks whose tensor dimensions agree, in order.
        limit: The number of elements that one intermediate result may have.

    Returns:
        All inner products of rows, of shape ``(k, b, k, b)``.
    """
    blocks = merge(blocks)
    limit = limit_on(blocks[0].operands[0].device.type, blocks[0].dtype, limit)
    plan = find_plan(signature_of(blocks), limit)
    if plan.method == "rows":
        return _gram_of_rows(blocks, plan)
    total = _gram_of_factors(blocks[0], plan)
    for i, first in enumerate(blocks[1:], start=1):
        for second in blocks[:i]:
            product = cross(first, second, plan.chunks)
            total = total + product + product.permute(2, 3, 0, 1)
        total = total + _gram_of_factors(first, plan)
    return total


def cross(first: Block, second: Block, chunks: int = 1) -> Tensor:
    """Inner products of the rows of two blocks of one tensor, ``(k, b, k, b)``."""
    equation = cross_equation(first.equation, second.equation)
    if chunks == 1:
        return einsum(equation, first.operands + second.operands)
    parts = second.chunks("b", chunks)
    return torch.cat([einsum(equation, first.operands + part.operands) for part in parts], 3)


def rows(blocks: Sequence[Block], memory: Memory | None = None) -> Tensor:
    """The explicit rows of the sum of some blocks, of shape ``(k, b, *tensor)``.

    Args:
        blocks: Some blocks.
        memory: Where to put them if they are those of one block, for as long as it is valid.
    """
    memory = memory if len(blocks) == 1 else None
    total = einsum(blocks[0].equation, blocks[0].operands, memory)
    for block in blocks[1:]:
        total = total + einsum(block.equation, block.operands)
    return total


def explicit(blocks: list[Block], memory: Memory | None = None) -> Block:
    """The sum of some blocks as a block of explicit rows, in the order that takes no copy.

    Args:
        blocks: Some blocks.
        memory: As for :func:`rows`.
    """
    return Block(_equation_of_rows(blocks[0].equation), (_dense(blocks, memory),))


def _dense(blocks: list[Block], memory: Memory | None) -> Tensor:
    """Explicit rows in the order that takes no copy."""
    order = order_of_rows(blocks[0].equation)
    return rows([block.reorder(order) for block in blocks], memory).contiguous()


@lru_cache(maxsize=4096)
def _equation_of_rows(equation: str) -> str:
    """That of explicit rows, in the order that takes no copy."""
    parameter = equation.split("->")[1][2:]
    labels = "".join(parameter[d] for d in order_of_rows(equation))
    return f"kb{labels}->kb{parameter}"


def merge(blocks: Sequence[Block]) -> list[Block]:
    """Blocks of equal form made one, along an index that is summed over.

    A layer that is applied many times (a recurrent loop) then costs one contraction, in which the
    planner sees the applications as positions.
    """
    if len(blocks) == 1:
        return list(blocks)
    groups: dict[tuple[str, Shapes], list[Block]] = {}
    for block in blocks:
        groups.setdefault((block.equation, _shapes_beside_positions(block)), []).append(block)
    return [_join(group) if len(group) > 1 else group[0] for group in groups.values()]


def _position(equation: str) -> str | None:
    """An index that every operand has and that is summed over, if there is one."""
    inputs, output = equation.split("->")
    common = set.intersection(*(set(of) for of in inputs.split(","))) - set(output)
    return min(common, default=None)


def _shapes_beside_positions(block: Block) -> Shapes:
    """The shapes of a block, less what may differ between blocks that are joined."""
    label = _position(block.equation)
    pairs = zip(block.inputs, block.shapes, strict=True)
    return tuple(
        tuple(0 if of == label else n for of, n in zip(labels, shape, strict=True))
        for labels, shape in pairs
    )


def _join(blocks: list[Block]) -> Block:
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


def _gram_of_rows(blocks: list[Block], plan: Plan) -> Tensor:
    """The Gramian by explicit rows, a part of the tensor at a time."""
    blocks = [block.reorder(plan.order) for block in blocks]
    first = blocks[0]
    is_there = len(blocks) == 1 and first.is_rows and first.operands[0].is_contiguous()
    if plan.chunks == 1 or is_there:
        return _outer_of_rows(blocks)
    position = blocks[0].parameter.index(plan.label)
    cut = [block.chunks(block.parameter[position], plan.chunks) for block in blocks]
    return reduce(torch.add, (_outer_of_rows(part) for part in zip(*cut, strict=True)))


def _gram_of_factors(block: Block, plan: Plan) -> Tensor:
    """The Gramian of one block by its factors, of which one half is the mirror of the other."""
    chunks = plan.chunks
    if plan.cost > _WORTH_MIRRORING:
        chunks = max(chunks, min(4, block.sizes["b"] // _FEWEST_SAMPLES))
    if chunks == 1:
        product = cross(block, block)  # it may be stored as its mirror image, which it is, too
        return product if product.is_contiguous() else product.permute(2, 3, 0, 1)
    block = _with_copy(block)
    k, b = block.sizes["k"], block.sizes["b"]
    total = block.operands[0].new_empty(k, b, k, b)
    start = 0
    for part in block.chunks("b", chunks):
        stop = start + part.sizes["b"]
        rest = block.map("b", lambda x, dim, s=start: x.narrow(dim, s, b - s))  # type: ignore[misc]  # the default binds the loop's value
        product = cross(rest, part)
        total[:, start:, :, start:stop] = product
        total[:, start:stop, :, start:] = product.permute(2, 3, 0, 1)
        start = stop
    return total


def _with_copy(block: Block) -> Block:
    """The block with a copy of its largest factor if that repeats elements, as patches do.

    Each of several products would copy it. There is memory for one such copy at a time.
    """
    largest = max(block.operands, key=Tensor.numel)
    if not repeats(largest) or not fits(largest.shape, largest):
        return block
    copy = allocate(scratch("whole"), largest.shape, largest).copy_(largest)
    return Block(block.equation, tuple(copy if x is largest else x for x in block.operands))


def _outer_of_rows(blocks: Sequence[Block]) -> Tensor:
    """The rows of some blocks times themselves, of which only the products are kept."""
    return _outer(rows(blocks, scratch("result")))


def _outer(matrix: Tensor) -> Tensor:
    """Rows of shape ``(k, b, *)`` times themselves, ``(k, b, k, b)``."""
    k, b = matrix.shape[:2]
    m = k * b
    flat = matrix.reshape(m, -1)
    if m < 2 * _FEWEST_SAMPLES or flat.numel() < _WORTH_SPLITTING:
        return _long_product(flat, flat).view(k, b, k, b)
    half = m // 2  # one of the two mixed quarters is the mirror of the other
    gram = flat.new_empty(m, m)
    gram[:, :half] = _long_product(flat, flat[:half])
    gram[half:, half:] = _long_product(flat[half:], flat[half:])
    gram[:half, half:] = gram[half:, :half].mT
    return gram.view(k, b, k, b)


def _long_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right.T`` for matrices with few rows and many columns."""
    if left.numel() < _WORTH_SPLITTING or left.shape[1] % _PARTS:
        return left @ right.mT
    left, right = (
        x.view(len(x), _PARTS, -1).transpose(0, 1)
        for x in (left, right)  # (parts, rows, n)
    )
    return torch.bmm(left, right.mT).sum(0)
