"""Uses that are contracted by themselves: each reads parameters that no other use reads.

Once it is certain where the samples are, no value decides about the contraction of such a use. So
its calls are the same for all uses of equal form: for the layers of a model, and for the next step.
Choosing these calls takes several times as long as making them, where a device waits for the host.
So the calls are written down as a program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autogram._blocks import (
    Block,
    Bundles,
    Columns,
    Devices,
    Folded,
    Keep,
    Lookup,
    Memory,
    Program,
    Region,
    Room,
    are_plain,
    block_of,
    form_in_bundle,
    forms,
    gram_of_bundle,
    written_down,
)
from autogram._capture.uses import RuleUse


class Conditions(NamedTuple):
    """How a pass contracts."""

    devices: Devices
    form: Keep | None
    """Whether to keep factors or rows, or ``None`` to keep nothing."""
    memory: Memory | None
    """Gives memory for kept rows, if anything does."""
    options: Hashable
    """All of the above and of PyTorch's settings that decides about calls, but the limit."""


class Addition(NamedTuple):
    """What a use adds to a pass, contracted by itself."""

    parts: Sequence[Tensor]
    """Parts of the Gramian, ``(k b, k b)``."""
    columns: dict[int, Columns]
    """The columns of each parameter, as far as they are kept, or wait for a bundle."""
    waiting: list[tuple[int, Hashable, int]]
    """The numbers of those that wait, with their forms and numbers of elements there."""
    taken: int
    """How many elements of rows are kept that are larger than their factors."""
    is_short: bool = False
    """Whether there was no room for others that were to be kept."""

    @property
    def blocks(self) -> list[Block | Lookup]:
        """What the columns are made of."""
        return [of for columns in self.columns.values() for _, of in columns.found()]

    @property
    def tensors(self) -> list[Tensor]:
        """The parts, and then the operands of the blocks."""
        return [*self.parts, *[x for of in self.blocks for x in of.operands]]


class _Known(NamedTuple):
    """A program for uses of one form, and what its results are."""

    program: Program
    parts: int
    columns: list[tuple[int, Region, list[tuple[Region, str, slice]]]]
    """By parameter: the region, the equation and the results of each block."""
    waiting: list[tuple[int, Hashable, int]]
    taken: int

    @classmethod
    def of(cls, program: Program, found: Addition) -> _Known:
        """The program by which something was contracted."""
        columns, start = [], len(found.parts)
        for i, of in found.columns.items():
            blocks = []
            for region, block in of.found():
                stop = start + len(block.operands)
                blocks.append((region, block.equation, slice(start, stop)))
                start = stop
            columns.append((i, of.parameter, blocks))
        return cls(program, len(found.parts), columns, found.waiting, found.taken)


def contract_alone(
    use: RuleUse,
    parameters: Sequence[Tensor],
    layout: Folded,
    tensors: Sequence[Tensor],
    conditions: Conditions,
    room: Room,
) -> Addition | None:
    """Contracts a use by the program for its form, if there is one or it is time to write it.

    Where calls may depend on more than the form of a use, there is none. The ``parameters`` are in
    the order of its reads, without repetitions, and the ``tensors`` are its cotangent
    ``(k, *output)`` and what its rule has saved.
    """
    key = _key(use, parameters, layout, tensors, conditions)
    programs = conditions.devices.programs
    if key is None:
        return None
    known: _Known | Literal[False] | None = programs.get(key)
    if known is False or (known and known.taken and not room(tensors[0].device, known.taken)):
        return None
    if known:
        results = known.program(conditions.memory, tensors)
        kept: dict[int, Columns] = {}
        for i, whole, blocks in known.columns:
            factors = [(of, block_of(equation, results[own])) for of, equation, own in blocks]
            kept[i] = Columns.of(whole, conditions.devices.on(parameters[i].device), factors)
        return Addition(results[: known.parts], kept, known.waiting, known.taken)
    if not programs.is_due(key):
        return None
    devices = conditions.devices
    # Made here: what is written down may read no other tensor than those given.
    columns = {p: Columns(Region.of_parameter(p), devices.on(p.device)) for p in parameters}
    contract = partial(_contract, use, columns, layout, conditions, room)
    found, program = written_down(contract, lambda x: x.tensors, conditions.memory, tensors)
    if found.is_short:
        programs.put_off(key)
    # A faster way to the weighted sums of a block is no tensor.
    elif program is None or any(isinstance(x, Block) and x.adjoint for x in found.blocks):
        programs.keep(key, False)
    else:
        programs.keep(key, _Known.of(program, found))
    return found


def columns_of(
    use: RuleUse,
    parameters: Sequence[Tensor],
    layout: Folded,
    tensors: Sequence[Tensor],
    devices: Devices,
) -> dict[Tensor, Columns]:
    """The columns of a use's parameters, of the blocks that :func:`contract_alone` contracts."""
    columns = {p: Columns(Region.of_parameter(p), devices.on(p.device)) for p in parameters}
    _fill(columns, use, layout, tensors, devices)
    return columns


def _fill(
    columns: Mapping[Tensor, Columns],
    use: RuleUse,
    layout: Folded,
    tensors: Sequence[Tensor],
    devices: Devices,
) -> None:
    """Adds the blocks of a use to the columns of its parameters."""
    cotangent, *saved = tensors
    for tracked, region, block in use.contributions(layout, cotangent, tuple(saved), devices.limit):
        columns[tracked.sources[0]].add(region, block)


def _contract(
    use: RuleUse,
    columns: Mapping[Tensor, Columns],
    layout: Folded,
    conditions: Conditions,
    room: Room,
    memory: Memory | None,
    tensors: Sequence[Tensor],
) -> Addition:
    """Contracts a use by itself, into the columns of each parameter, which are empty before."""
    _fill(columns, use, layout, tensors, conditions.devices)
    taken, is_short = 0, False

    def has_room(device: torch.device, elements: int) -> bool:
        nonlocal is_short
        found = room(device, taken + elements)
        is_short = is_short or not found
        return found

    if (form := conditions.form) is not None:
        for of in columns.values():
            taken += of.keep(form, has_room, memory)
    bundles = Bundles()
    found = [gram_of_bundle(bundle) for bundle in bundles.add(*columns.values())]
    tiny = {id(of) for bundle in bundles.rest() for of in bundle}
    parts = [part.flatten(2).flatten(0, 1) for part in found if part is not None]
    numbered = list(enumerate(columns.values()))
    kept = {i: of for i, of in numbered if form is not None or id(of) in tiny}
    few = [(i, of, of.single) for i, of in numbered if id(of) in tiny]
    waiting = [(i, *form_in_bundle(of, block)) for i, of, block in few if block is not None]
    return Addition(parts, kept, waiting, taken, is_short)


def _key(
    use: RuleUse,
    parameters: Sequence[Tensor],
    layout: Folded,
    tensors: Sequence[Tensor],
    conditions: Conditions,
) -> Hashable | None:
    """All that decides about the calls of a use's contraction, or ``None`` if more may decide."""
    if not are_plain(tensors):
        return None
    key: list[Hashable] = [layout, conditions.devices.limit.elements, conditions.options]
    try:
        for operands, (dims, blocks, groups, _), saved in use.recipes:
            are_tracked = None not in operands or tuple([x is not None for x in operands])
            if (made := _MADE.get(blocks)) is None:
                made = _MADE[blocks] = _made_of(blocks)
            key += are_tracked, dims, made, groups, saved.stop
    except _ImpureError:
        return None
    for of in use.reads:
        if of.region is None or of.place is None:  # of a compiled part
            return None
        key += of.region.numbers, of.place.numbers, of.sources[0].device
    if len(use.reads) > len(parameters):  # some are read twice
        numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
        key += [numbers[id(of.sources[0])] for of in use.reads]
    return (*key, forms(tensors))


class _ImpureError(Exception):
    """More than its arguments may decide about the calls of a function."""


_MADE: WeakKeyDictionary[Callable[..., Any], Any] = WeakKeyDictionary()
"""What functions are made of. Many rules make one for each call, which is gone with its graph."""


def _made_of(value: Any) -> Any:
    """What a function or an argument is made of, equal for functions that make equal calls.

    Raises ``_ImpureError`` if it may be the user's, or may read what is no argument.
    """
    if isinstance(value, partial):
        named = [(name, _made_of(x)) for name, x in value.keywords.items()]
        return (_made_of(value.func), _made_of(value.args), *named)
    if isinstance(value, tuple):
        return tuple([_made_of(x) for x in value])
    if isinstance(value, MethodType) and isinstance(value.__self__, tuple):
        return _made_of(value.__func__), _made_of(value.__self__)
    if isinstance(value, (int, float, str, type(None))):
        return value
    is_bare = isinstance(value, FunctionType) and value.__closure__ is None
    if is_bare and value.__module__.partition(".")[0] in ("autogram", "torch"):
        return value
    raise _ImpureError
