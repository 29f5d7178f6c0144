"""Bundles: small columns of several parameters, contracted together.

A contraction of small factors takes less time than the calls that lead to it. Tiny columns of equal
form are stacked, to be contracted as those of one parameter with one more dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from autogram._blocks.block import Block, Form, Shapes, sizes_of, unused_labels
from autogram._blocks.columns import Columns
from autogram._blocks.gram import gram
from autogram._blocks.plan import forms_rows, meta
from autogram._blocks.products import weighted_sum
from autogram._blocks.region import Region
from autogram._blocks.storage import own, restore, strides_of_gradient

# Elements of factors or rows. Contractions of larger ones take longer than the calls around them.
_SMALL = 2**17

# Elements of factors on a CPU. Copies of larger ones take longer than calls. On other devices, a
# call takes longer than copies of all that is small.
_TINY = 2**13

# Elements of a bundle, which keeps what could else be freed.
_FULL = 2**22

T = TypeVar("T")


@dataclass(slots=True)
class _Open(Generic[T]):
    """A bundle that is not full."""

    members: list[T]
    elements: int


class _Bundler(Generic[T]):
    """Ties what is on one device and of one dtype into bundles.

    Args:
        limit: The number of elements that a bundle may have.
    """

    def __init__(self, limit: int) -> None:
        self._most = min(_FULL, limit)
        self._open: dict[tuple[torch.device, torch.dtype], _Open[T]] = {}

    def add(self, member: T, block: Block, elements: int) -> list[T]:
        """Takes a member in.

        Returns:
            The bundle that it did not fit in, or nothing.
        """
        kind = block.operands[0].device, block.dtype
        bundle = self._open.get(kind)
        if bundle is not None and bundle.elements + elements <= self._most:
            bundle.members.append(member)
            bundle.elements += elements
            return []
        self._open[kind] = _Open([member], elements)
        return [] if bundle is None else bundle.members

    def rest(self) -> Iterator[list[T]]:
        """The bundles that are not full."""
        while self._open:
            yield self._open.popitem()[1].members


class Bundles:
    """Columns that wait for others, to be contracted together.

    Args:
        limit: The number of elements that a bundle may have.
    """

    def __init__(self, limit: int) -> None:
        self._bundler: _Bundler[Columns] = _Bundler(limit)

    def add(self, columns: Columns) -> list[Columns]:
        """Takes in the columns of one parameter.

        Returns:
            What is to be contracted now: the columns alone if they are not small, a bundle that
            they did not fit in, or nothing.
        """
        block = columns.single
        how = "not" if block is None else _how_to_wait(block.equation, block.shapes)
        if how == "as rows":
            columns.keep("auto", 0)
            block = columns.single
        if block is None or how == "not":
            return [columns]
        return self._bundler.add(columns, block, _elements(block.shapes))

    def rest(self) -> Iterator[list[Columns]]:
        """What still waits."""
        return self._bundler.rest()


def bundled(found: Iterable[Columns], limit: int) -> Iterator[list[Columns]]:
    """The columns of some parameters, small ones in bundles of no more elements than a limit."""
    bundles = Bundles(limit)
    for columns in found:
        if ready := bundles.add(columns):
            yield ready
    yield from bundles.rest()


def gram_of_bundle(bundle: Sequence[Columns], limit: int) -> Tensor | None:
    """The sum of the Gramians of a bundle, as :meth:`Columns.gram` gives them.

    Args:
        bundle: The columns of some parameters.
        limit: The number of elements that one intermediate result may have.
    """
    if len(bundle) == 1:
        return bundle[0].gram(limit)
    for columns in bundle:
        columns.check()
    blocks = [block for block in (columns.single for columns in bundle) if block is not None]
    return _gram_of_all(blocks, limit)


def weighted_sums(
    found: Mapping[Tensor, Columns], weights: Tensor, limit: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """J^T w of some parameters, as :meth:`Columns.weighted_sum` gives it, in any order.

    Args:
        found: The columns of each parameter.
        weights: ``(k, b)``, or several of them, ``(s, k, b)``.
        limit: The number of elements that one intermediate result may have.

    Returns:
        Tensors that own their memory, with strides as autograd would give them.
    """
    count = prod(weights.shape[:-2])
    for bundle in _bundles_for_sums(found, count, limit):
        if len(bundle) == 1:
            ((parameter, columns, _),) = bundle
            moved = weights.to(parameter.device)
            total = columns.weighted_sum(moved, limit)
            yield parameter, None if total is None else own([total], [_strides(total, columns)])[0]
            continue
        for _, columns, _ in bundle:
            columns.check()
        parameters, together, blocks = zip(*bundle, strict=True)
        moved = weights.to(blocks[0].operands[0])
        regions = tuple([columns.parameter for columns in together])
        sums = _sums_of_all([*blocks], moved, regions, limit)
        strides = [_strides(total, of) for total, of in zip(sums, together, strict=True)]
        yield from zip(parameters, own(sums, strides), strict=True)


def _strides(total: Tensor, columns: Columns) -> tuple[int, ...]:
    """The strides of a weighted sum, ``(*parameter)``, or of several, ``(s, *parameter)``."""
    strides = strides_of_gradient(columns.parameter)
    is_stack = total.dim() > len(strides)
    return (total.numel() // max(1, len(total)), *strides) if is_stack else strides


_Member = tuple[Tensor, Columns, Block | None]
"""A parameter, its columns, and their only block if they wait for others."""


def _bundles_for_sums(
    found: Mapping[Tensor, Columns], count: int, limit: int
) -> Iterator[list[_Member]]:
    """Parameters whose weighted sums are computed together, by the size of factors and results."""
    bundler: _Bundler[_Member] = _Bundler(limit)
    for parameter, columns in found.items():
        block = columns.single
        if block is None or block.adjoint is not None or not _is_small(block.shapes):
            yield [(parameter, columns, None)]
            continue
        elements = _elements(block.shapes) + count * parameter.numel()
        if ready := bundler.add((parameter, columns, block), block, elements):
            yield ready
    yield from bundler.rest()


def _gram_of_all(blocks: list[Block], limit: int) -> Tensor:
    """The sum of the Gramians of some blocks, each of a tensor of its own."""
    k, b = blocks[0].sizes["k"], blocks[0].sizes["b"]
    # As matrices, which most of them are before they are viewed otherwise.
    parts = (gram([block], limit).reshape(k * b, k * b) for block, _ in _stacks(blocks))
    return reduce(torch.add, parts).view(k, b, k, b)


def _sums_of_all(
    blocks: list[Block],
    weights: Tensor,
    regions: tuple[Region, ...],
    limit: int,
) -> tuple[Tensor, ...]:
    """The weighted sums of some blocks, each of a parameter of its own."""
    stack = weights if weights.dim() == 3 else weights.unsqueeze(0)
    sums: dict[int, Tensor] = {}
    for block, members in _stacks(blocks):
        total = weighted_sum([block], stack, limit)
        for i, member in enumerate(members):
            part = total if len(members) == 1 else total.select(1, i)
            found = restore(part.reshape(len(stack), -1), regions[member])
            sums[member] = found if stack is weights else found[0]
    return tuple(sums[member] for member in range(len(blocks)))


def _stacks(blocks: Sequence[Block]) -> Iterator[tuple[Block, list[int]]]:
    """Some blocks, tiny ones of equal form in one; and which blocks each stands for."""
    groups: dict[Form | int, list[int]] = {}
    for i, block in enumerate(blocks):
        groups.setdefault(block.form if _is_tiny(block) else i, []).append(i)
    for members in groups.values():
        first = blocks[members[0]]
        if len(members) > 1:
            equation, dim = _stacked_equation(first.equation)
            operands = zip(*(blocks[i].operands for i in members), strict=True)
            first = Block(equation, tuple([torch.stack(x, dim) for x in operands]))
        yield first, members


@lru_cache(maxsize=4096)
def _elements(shapes: Shapes) -> int:
    """Elements of some factors."""
    return sum(prod(shape) for shape in shapes)


def _is_small(shapes: Shapes) -> bool:
    """Whether calls would cost more than what they do with factors of some shapes."""
    return _elements(shapes) <= _SMALL


def _is_tiny(block: Block) -> bool:
    """Whether calls would cost more than copies of a block, which is small."""
    return block.operands[0].device.type != "cpu" or _elements(block.shapes) <= _TINY


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
