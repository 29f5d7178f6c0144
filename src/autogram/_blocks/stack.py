"""Stacks: small columns of several parameters of equal form, contracted as those of one.

A contraction of small factors takes less time than the calls that lead to it. A stack is the
columns of a parameter with one more dimension, so that what contracts columns contracts stacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Literal

import torch
from torch import Tensor

from autogram._blocks.block import Block, Form, Shapes, sizes_of, unused_labels
from autogram._blocks.columns import Columns
from autogram._blocks.plan import forms_rows, meta
from autogram._blocks.region import Region

# Elements of factors or rows. Of larger ones, copies would take longer than calls.
_SMALL = 2**17

# Elements of a stack, which keeps what could else be freed.
_FULL = 2**21


class Stacks:
    """Columns that wait for others of their form, to be contracted together.

    Args:
        limit: The number of elements that a stack may have.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[Form, list[Columns]] = {}

    def add(self, columns: Columns) -> Columns | None:
        """Takes in the columns of one parameter.

        Returns:
            What is to be contracted now: the columns themselves if they cannot be stacked, a stack
            that became full, or nothing.
        """
        block = columns.single
        if block is None:
            return columns
        form = block.form
        how = _how_to_wait(form.equation, form.shapes)
        if how == "not":
            return columns
        if how == "as rows":
            columns.keep("auto", 0)
            block = columns.single
            assert block is not None
            form = block.form
        waiting = self._waiting.setdefault(form, [])
        waiting.append(columns)
        if not _is_full(len(waiting), form, self._limit):
            return None
        return _stack(self._waiting.pop(form))

    def rest(self) -> Iterator[Columns]:
        """What still waits."""
        while self._waiting:
            yield _stack(self._waiting.popitem()[1])


def stacked(found: Iterable[Columns], limit: int) -> Iterator[Columns]:
    """The columns of some parameters, the small ones in stacks of no more elements than a limit."""
    stacks = Stacks(limit)
    for columns in found:
        ready = stacks.add(columns)
        if ready is not None:
            yield ready
    yield from stacks.rest()


def weighted_sums(
    found: Mapping[Tensor, Columns], weights: Tensor, limit: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """J^T w of some parameters, as :meth:`Columns.weighted_sum` gives it, in any order.

    Args:
        found: The columns of each parameter.
        weights: ``(s, k, b)``.
        limit: The number of elements that one intermediate result may have.
    """
    for parameters in _groups(found, limit):
        columns = _stack([found[p] for p in parameters])
        sums = columns.weighted_sum(weights.to(parameters[0].device), limit)
        if len(parameters) == 1:
            yield parameters[0], sums
        else:
            assert sums is not None
            for parameter, part in zip(parameters, sums.unbind(1), strict=True):
                yield parameter, found[parameter].restore(part)


def _groups(found: Mapping[Tensor, Columns], limit: int) -> Iterator[list[Tensor]]:
    """Parameters whose columns make a stack, and alone those whose sums are not small."""
    waiting: dict[Form, list[Tensor]] = {}
    for parameter, columns in found.items():
        block = columns.single
        is_small = block is not None and block.adjoint is None and _is_small(block.shapes)
        if block is None or not is_small or parameter.numel() > _SMALL:
            yield [parameter]
            continue
        form = block.form
        waiting.setdefault(form, []).append(parameter)
        if _is_full(len(waiting[form]), form, limit):
            yield waiting.pop(form)
    yield from waiting.values()


def _is_full(count: int, form: Form, limit: int) -> bool:
    """Whether as many columns wait as should, all of one form."""
    return (count + 1) * _elements(form.shapes) > min(_FULL, limit)


def _stack(found: Sequence[Columns]) -> Columns:
    """Columns of equal form as those of one parameter with one more dimension, the first."""
    for columns in found:
        columns.check()
    if len(found) == 1:
        return found[0]
    blocks = [columns.single for columns in found]
    first = blocks[0]
    assert first is not None
    operands = zip(*(block.operands for block in blocks if block is not None), strict=True)
    stack = Columns(Region.contiguous((len(found), *(first.sizes[x] for x in first.parameter))))
    equation, dim = _stacked_equation(first.equation)
    stack.add(stack.parameter, Block(equation, tuple([torch.stack(x, dim) for x in operands])))
    return stack


@lru_cache(maxsize=4096)
def _elements(shapes: Shapes) -> int:
    """Elements of some factors."""
    return sum(prod(shape) for shape in shapes)


def _is_small(shapes: Shapes) -> bool:
    """Whether calls would cost more than what they do with factors of some shapes."""
    return _elements(shapes) <= _SMALL


@lru_cache(maxsize=4096)
def _how_to_wait(equation: str, shapes: Shapes) -> Literal["as it is", "as rows", "not"]:
    """Whether a block's factors are small, or its rows, which the Gramian would form."""
    if _is_small(shapes):
        return "as it is"
    sizes = sizes_of(equation, shapes)
    rows = tuple(sizes[label] for label in equation.split("->")[1])
    is_worth = _is_small((rows,)) and forms_rows([Block(equation, meta(shapes))])
    return "as rows" if is_worth else "not"


@lru_cache(maxsize=4096)
def _stacked_equation(equation: str) -> tuple[str, int]:
    """The equation of a stack, and the dimension of every factor along which it is stacked.

    Explicit rows are stacked behind the dimensions of the objectives, where they need no copy.
    """
    inputs, output = equation.split("->")
    label = next(unused_labels(equation))
    stacked = f"kb{label}{output[2:]}"
    if inputs[:2] == "kb" and len(inputs) == len(output):
        return f"kb{label}{inputs[2:]}->{stacked}", 2
    return f"{','.join(label + term for term in inputs.split(','))}->{stacked}", 0
