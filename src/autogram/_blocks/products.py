"""Rows of blocks, and their products with vectors, with themselves and with other rows.

All blocks in one argument belong to one tensor, and stand for their sum.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from autogram._blocks.block import Block, cross_equation, joined, parsed
from autogram._blocks.kernels import Kernels, Memory
from autogram._blocks.kernels.paths import find_path, unused_labels, weighted
from autogram._blocks.plan import (
    ProductKind,
    count_pieces,
    flat_rows,
    order_of_rows,
    plans,
    products_of_rows,
    rows,
    rows_of_block,
)


def products(
    kind: ProductKind, first: Sequence[Block], second: Sequence[Block], kernels: Kernels
) -> Tensor:
    """Products of rows with the cheapest plan, as from :class:`Plan`.

    Norms from rows or factors are mixed ghost clipping (Bu et al. 2022, arXiv:2205.10683).
    """
    if not second and len(first) == 1 and (there := rows_of_block(first[0], kernels)) is not None:
        return products_of_rows(kind, there, kernels)  # there is nothing to compare
    both = merge(first, kernels), merge(second, kernels) if second else []
    for blocks in both:  # no plan is faster than these adjoints
        if fast := [x for x in blocks if x.has_fast_adjoint(kernels)]:
            blocks[:] = [explicit(fast, kernels), *[x for x in blocks if x not in fast]]
    return plans(kind, *both, kernels)[0](*both, kernels)


def share_factor(outer: Block, rows: Block, kernels: Kernels) -> bool:
    """Whether some rows are also the first factor of an outer product, contracted by factors.

    The cotangents of a layer are both the rows of its bias and a factor of the rows of its weight.
    """
    if rows.operands[0] is not outer.operands[0] or not rows.is_rows or len(outer.inputs) != 2:
        return False
    first, second = outer.inputs
    is_sum = len(first) + len(second) != 3 + len(outer.parameter)
    if is_sum or first[:2] != "kb" or second[:1] != "b" or "k" in second:
        return False
    plan = plans("gram", [outer], (), kernels)[0]
    return plan.pieces == 1 and plan.method == "factors"


def gram_with_factor(outer: Block, kernels: Kernels) -> Tensor:
    """The Gramian of an outer product and that of its first factor, added up, ``(k, b, k, b)``.

    <g x^T, h y^T> + <g, h> = <g, h> (<x, y> + 1), with the products of the first factors computed
    once.
    """
    rows, factor = outer.operands
    first, second = outer.inputs
    of_rows = kernels.einsum(cross_equation(*(f"{first}->{first}",) * 2), (rows, rows))
    of_factor = kernels.einsum(f"b{second[1:]},c{second[1:]}->bc", (factor, factor))
    return torch.addcmul(of_rows, of_rows, of_factor.unsqueeze(1))


def explicit(blocks: Sequence[Block], kernels: Kernels, memory: Memory | None = None) -> Block:
    """A block of explicit rows, in an order that needs no copy."""
    order, parameter = order_of_rows(blocks[0], kernels), blocks[0].parameter
    explicit_rows = rows([block.reorder(order) for block in blocks], kernels, memory)
    labels = "".join(parameter[d] for d in order)
    return Block(f"kb{labels}->kb{parameter}", (explicit_rows.contiguous(),))


def weighted_sum(blocks: Sequence[Block], weights: Tensor, kernels: Kernels) -> Tensor:
    """Sums of rows with weights ``(s, k, b)``: J^T w, ``(s, *tensor)``.

    If that is cheaper, the weights multiply the cotangents before any sum. A linear layer then
    costs as much as the gradient of its weight in an ordinary backward pass (Bu et
    al. 2022, arXiv:2210.00038).
    """
    there = rows_of_block(blocks[0], kernels) if len(blocks) == 1 else None
    if there is not None and there.dtype == weights.dtype:
        flat, order = weights.flatten(1) @ flat_rows(there), parsed(blocks[0].equation).places
        return flat.view(len(weights), *there.shape[2:]).permute(0, *[place - 1 for place in order])
    can_adjoin = len(weights) == 1
    parts = [
        block.adjoint(weights[0], block.parameter, kernels).unsqueeze(0)
        for block in blocks
        if block.adjoint and can_adjoin
    ]
    for block in merge([x for x in blocks if not (x.adjoint and can_adjoin)], kernels):
        whole = Block(weighted(block.equation), (weights, *block.operands))
        pieces = _by_samples(whole, kernels)
        sums = [kernels.weighted_sum(x.equation, x.operands) for x in pieces]
        parts.append(reduce(torch.add, sums))
    return reduce(torch.add, parts)


def directional(blocks: Sequence[Block], direction: Tensor, kernels: Kernels) -> Tensor:
    """Products of the rows with a direction of the tensor's shape: J v, ``(k, b)``."""
    total = []
    for block in merge(blocks, kernels):
        inputs, output = block.equation.split("->")
        whole = Block(f"{inputs},{output[2:]}->kb", (*block.operands, direction))
        parts = [kernels.einsum(x.equation, x.operands) for x in _by_samples(whole, kernels)]
        total.append(joined(parts, 1))
    return reduce(torch.add, total)


def _by_samples(whole: Block, kernels: Kernels) -> Iterator[Block]:
    """An einsum cut into ranges of samples that keep the limit."""
    limit = kernels.most_elements(whole.operands[0].dtype)
    # Operands count too: patches of an image are a view that a matrix product must copy.
    shapes = whole.shapes
    largest = max(find_path(whole.equation, shapes).largest, *[prod(shape) for shape in shapes])
    return whole.chunks("b", count_pieces(largest, limit, whole.sizes["b"]))


def merge(blocks: Sequence[Block], kernels: Kernels) -> list[Block]:
    """Joins blocks of equal equations and shapes along an index that is summed over.

    A layer that is applied many times (a recurrent loop) then costs one contraction, in which the
    planner sees the applications as positions. Blocks with a fast adjoint are unchanged.
    """
    if len(blocks) < 2:
        return list(blocks)
    groups: dict[Hashable, list[Block]] = {}
    for block in blocks:
        is_alone = block.has_fast_adjoint(kernels)
        form = id(block) if is_alone else block.form(parsed(block.equation).positions[:1])
        groups.setdefault(form, []).append(block)
    return [_join(group) if len(group) > 1 else group[0] for group in groups.values()]


def _join(blocks: Sequence[Block]) -> Block:
    """One block for several of equal form."""
    inputs, output = blocks[0].equation.split("->")
    operands = list(zip(*(block.operands for block in blocks), strict=True))
    if label := parsed(blocks[0].equation).positions[:1]:
        dims = [of.index(label) for of in inputs.split(",")]
        joined = (torch.cat(uses, dim) for uses, dim in zip(operands, dims, strict=True))
        return Block(blocks[0].equation, tuple(joined))
    label = next(unused_labels(inputs))
    equation = ",".join(label + of for of in inputs.split(","))
    return Block(f"{equation}->{output}", tuple(torch.stack(uses) for uses in operands))
