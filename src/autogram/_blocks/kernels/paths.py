"""Paths: orders of contracting the operands of an einsum, and their costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from string import ascii_letters
from typing import NamedTuple

import opt_einsum

from autogram._blocks.kernels.contraction import Contraction

OperandShapes = tuple[tuple[int, ...], ...]


class Prices(NamedTuple):
    """Costs on some hardware, in multiply-adds of a matrix product.

    Attributes:
        memory: Writing one element, and reading it again.
        call: Launching one operation, if that takes longer than the operation.
        mirror: Above this cost, half of a Gramian from factors is computed, and mirrored.
        thin: With fewer samples on a side, parts of such a Gramian are too thin.
    """

    memory: int
    call: int = 0
    mirror: float = inf
    thin: int = 1


@dataclass(frozen=True)
class Path:
    """An order of contracting the operands of an einsum, and its cost.

    Attributes:
        steps: Each step removes the tensors at some positions from a list, initially the
            operands, and appends their contraction.
        multiplications: Multiply-adds.
        moved: Elements of all intermediate results.
        largest: Elements of the largest intermediate result.
    """

    steps: tuple[tuple[tuple[int, ...], Contraction], ...]
    multiplications: int
    moved: int
    largest: int

    def cost(self, prices: Prices) -> int:
        """One number to compare plans by, in multiply-adds."""
        return self.multiplications + prices.memory * self.moved + prices.call * len(self.steps)


@lru_cache(maxsize=4096)
def find_path(equation: str, shapes: OperandShapes) -> Path:
    """The cheapest path of an einsum, by number of operations."""
    sizes = sizes_of(equation, shapes)
    pairs: Iterable[tuple[tuple[int, ...], str]] = [((0,) * len(shapes), equation)]
    if len(shapes) > 2:
        _, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
        pairs = _in_order(equation, [tuple(found[0]) for found in info.contraction_list])
    steps = tuple([(positions, Contraction.of(text, sizes)) for positions, text in pairs])
    work = [prod(sizes[label] for label in set(of.equation) - {*",->"}) for _, of in steps]
    moved = [
        volume
        if of.kind == "elementwise"
        else prod(sizes[label] for label in of.equation.split("->")[1])
        for (_, of), volume in zip(steps, work, strict=True)
    ]
    return Path(steps, sum(work), sum(moved), max(moved))


def _in_order(
    equation: str, steps: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Steps of a path with their equations, by the positions that each takes.

    Intermediate results have their indices in the order of the output, which then needs no copy.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    for positions in steps:
        taken = [terms.pop(position) for position in positions]
        own, needed = "".join(taken), "".join([*terms, output])
        kept = [x for x in dict.fromkeys(output + own) if x in own and x in needed]
        terms.append("".join(kept) if terms else output)
        yield positions, f"{','.join(taken)}->{terms[-1]}"


@lru_cache(maxsize=4096)
def sizes_of(equation: str, shapes: OperandShapes) -> Mapping[str, int]:
    """The size of every index of an einsum."""
    pairs = zip(equation.split("->")[0].split(","), shapes, strict=True)
    return {label: n for labels, shape in pairs for label, n in zip(labels, shape, strict=True)}


def unused_labels(*equations: str) -> Iterator[str]:
    """Letters that none of the equations contains, except ``k`` and ``b``."""
    used = set("kb").union(*equations)
    return (letter for letter in reversed(ascii_letters) if letter not in used)


@lru_cache(maxsize=4096)
def weighted(equation: str) -> str:
    """The equation of sums of rows with weights ``(s, k, b)``, which come first, from theirs."""
    inputs, output = equation.split("->")
    s = next(unused_labels(equation))
    return f"{s}kb,{inputs}->{s}{output[2:]}"
