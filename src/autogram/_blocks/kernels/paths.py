"""Paths: in which order the operands of an einsum are contracted, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from string import ascii_letters
from typing import Literal, NamedTuple

import opt_einsum

OperandShapes = tuple[tuple[int, ...], ...]
PathKind = Literal["sum", "elementwise", "matrices", "other"]


class Prices(NamedTuple):
    """What something costs on some hardware, in multiply-adds of a matrix product.

    Attributes:
        memory: Writing one element, and reading it again.
        call: Launching one operation, where that takes longer than the operation.
    """

    memory: int
    call: int = 0


@dataclass(frozen=True)
class Path:
    """The order in which the operands of an einsum are contracted, and what that costs.

    Attributes:
        steps: Each step takes the tensors at some positions out of a list, which begins as the
            operands, and appends their contraction by an equation.
        multiplications: Multiply-adds.
        moved: Elements of all intermediate results.
        largest: Elements of the largest intermediate result.
    """

    steps: tuple[tuple[tuple[int, ...], str], ...]
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
    steps: list[tuple[tuple[int, ...], str]] = [((0,) * len(shapes), equation)]
    if len(shapes) > 2:
        _, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
        steps = list(_in_order(equation, [tuple(found[0]) for found in info.contraction_list]))
    work = [prod(sizes[label] for label in set(of) - {*",->"}) for _, of in steps]
    moved = [
        volume
        if kind_of_path(of, sizes) == "elementwise"
        else prod(sizes[label] for label in of.split("->")[1])
        for (_, of), volume in zip(steps, work, strict=True)
    ]
    return Path(tuple(steps), sum(work), sum(moved), max(moved))


def _in_order(
    equation: str, steps: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Steps of a path with their equations, by the positions that each takes.

    Intermediate results have their indices in the order of the output, which needs no copy then.
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


def kind_of_path(equation: str, sizes: Mapping[str, int]) -> PathKind:
    """How to carry out one contraction.

    Where one operand has no index of its own, a matrix product would have a single column. A
    product followed by a sum reads each operand once, and ``torch.einsum`` would permute both.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if len(terms) == 1 and len(set(inputs)) == len(inputs):
        return "sum"
    if len(terms) == 2:
        own = [
            {x for x in labels if x not in others and sizes[x] != 1}
            for labels, others in (terms, terms[::-1])
        ]
        shared = set(terms[0]) & set(terms[1]) & set(output)
        if not all(own) and any(sizes[label] > 1 for label in shared):
            return "elementwise"
        if own[0] | own[1] <= set(output):
            return "matrices"
    return "other"


def unused_labels(*equations: str) -> Iterator[str]:
    """Letters that stand in none of the equations, ``k`` and ``b`` aside."""
    used = set("kb").union(*equations)
    return (letter for letter in reversed(ascii_letters) if letter not in used)


@lru_cache(maxsize=4096)
def weighted(equation: str) -> str:
    """The equation of sums of rows with weights ``(s, k, b)``, which come first, from theirs."""
    inputs, output = equation.split("->")
    s = next(unused_labels(equation))
    return f"{s}kb,{inputs}->{s}{output[2:]}"
