"""Plans: how the Gramian of some blocks is computed, chosen by cost from their shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import torch
from torch import Tensor

from autogram._blocks.block import Block, Shapes, cross_equation
from autogram._blocks.path import MEMORY_COST, find_path
from autogram._blocks.scratch import CPU_BYTES

# Which method is cheaper does not depend on the limit.
_ANY_LIMIT = 2**62

# Each pair of blocks of different form needs a path of its own, which takes a millisecond to find.
_MOST_BLOCKS_IN_PAIRS = 8

Signature = tuple[tuple[str, Shapes], ...]


@dataclass(frozen=True)
class Plan:
    """How the Gramian of some blocks of one tensor is computed.

    ``"rows"``: the blocks are added up as explicit rows, which are multiplied by themselves;
    ``label`` is the dimension of the tensor that is cut into ``chunks``. ``"factors"``: every pair
    of blocks is contracted without rows; the samples of one side are cut into ``chunks``.
    """

    method: Literal["rows", "factors"]
    label: str
    chunks: int
    cost: int
    """In multiply-adds, memory traffic included."""
    multiplications: int
    """Multiply-adds alone."""
    elements: int
    """Of the largest intermediate result."""
    order: tuple[int, ...] = ()
    """How rows have the dimensions of the tensor, which does not matter to their products."""


def forms_rows(blocks: Sequence[Block]) -> bool:
    """Whether the Gramian of some blocks of one tensor is computed from explicit rows."""
    return find_plan(signature_of(blocks), _ANY_LIMIT).method == "rows"


def signature_of(blocks: Sequence[Block]) -> Signature:
    """What plans depend on."""
    return tuple([(block.equation, block.shapes) for block in blocks])


def find_plan(signature: Signature, limit: int) -> Plan:
    """The cheaper of forming rows once and of contracting factors, within the memory limit."""
    return find_plans(signature, limit)[0]


@lru_cache(maxsize=4096)
def find_plans(signature: Signature, limit: int) -> tuple[Plan, ...]:
    """All ways that are considered, the cheapest first.

    An einsum path optimiser asked for the whole product cannot see that the rows are used twice,
    so the two are compared here. Both are cut into pieces where they exceed the limit.
    """
    blocks = [Block(equation, meta(shapes)) for equation, shapes in signature]
    by_rows = _plan_rows(blocks, limit)
    if len(blocks) > _MOST_BLOCKS_IN_PAIRS:
        return (by_rows,)
    return tuple(sorted((by_rows, _plan_factors(blocks, limit)), key=lambda plan: plan.cost))


def plans(blocks: Sequence[Block], device: str, limit: int) -> tuple[Plan, ...]:
    """All ways that are considered for some merged blocks on a device, the cheapest first."""
    return find_plans(signature_of(blocks), limit_on(device, blocks[0].dtype, limit))


def _plan_rows(blocks: list[Block], limit: int) -> Plan:
    """Forming the rows and multiplying them by themselves."""
    sizes = blocks[0].sizes
    m = sizes["k"] * sizes["b"]
    n = prod(sizes[label] for label in blocks[0].parameter)
    paths = [find_path(block.equation, block.shapes) for block in blocks]
    cost = m * m * n + MEMORY_COST * m * m
    if not (len(blocks) == 1 and blocks[0].is_rows):  # else there is nothing to form
        cost += sum(path.cost for path in paths) + MEMORY_COST * m * n
    work = sum(path.multiplications for path in paths) + m * m * n
    pairs = [pair for block in blocks for pair in zip(block.shapes, block.inputs, strict=True)]
    shape, labels = max(pairs, key=lambda pair: prod(pair[0]))
    elements = max(prod(shape), *(path.largest for path in paths))
    # Cut along an outer dimension of the largest operand, so that its parts too are copied one by
    # one, in long runs.
    inner = [label for label in blocks[0].parameter if label not in labels]
    order = [label for label in labels if label in blocks[0].parameter] + inner
    enough = [label for label in order if sizes[label] * limit >= elements]
    label = next(iter(enough), max(order, key=lambda label: sizes[label], default=""))
    chunks = count_parts(elements, limit, sizes.get(label, 1))
    largest = max(path.largest for path in paths)
    return Plan(
        "rows", label, chunks, cost, work, -(-largest // chunks), order_of_rows(blocks[0].equation)
    )


def order_of_rows(equation: str) -> tuple[int, ...]:
    """The order of a block's operands, in which a matrix product leaves the dimensions."""
    inputs, output = equation.split("->")
    places = [inputs.index(label) for label in output[2:]]
    return tuple(sorted(range(len(places)), key=lambda d: places[d]))


def _plan_factors(blocks: list[Block], limit: int) -> Plan:
    """Contracting every pair of blocks without rows."""
    paths = [
        find_path(cross_equation(p.equation, q.equation), p.shapes + q.shapes)
        for i, p in enumerate(blocks)
        for q in blocks[: i + 1]
    ]
    elements = max(path.largest for path in paths)
    chunks = count_parts(elements, limit, blocks[0].sizes["b"])
    cost, work = (sum(n) for n in zip(*((p.cost, p.multiplications) for p in paths), strict=True))
    return Plan("factors", "b", chunks, cost, work, -(-elements // chunks))


def limit_on(device: str, dtype: torch.dtype, limit: int) -> int:
    """The limit, and on a CPU what lies in memory that is kept between products."""
    return min(limit, CPU_BYTES // dtype.itemsize) if device == "cpu" else limit


def count_parts(elements: int, limit: int, size: int) -> int:
    """Into how many parts to cut an index of some size, so that each part keeps the limit."""
    return max(1, min(-(-elements // limit), size))


def meta(shapes: Shapes) -> tuple[Tensor, ...]:
    """Tensors without data, to plan with."""
    return tuple(torch.empty(shape, device="meta") for shape in shapes)
