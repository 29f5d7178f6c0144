"""Programs: calls to PyTorch that are carried out with other tensors than they were written for."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the value at some place of a program."""

    place: int


class Call(NamedTuple):
    """One call, with slots for tensors and memory."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    """Arguments by name."""
    result: int | None
    """The place of what it returns, or ``None`` if it changes something that has a place."""

    @property
    def reads(self) -> set[int]:
        """The places of what it is given."""
        return places_in((self.args, self.named))


class _Step(NamedTuple):
    """A call of a program, in the form in which it is quickly made."""

    function: Callable[..., Any]
    arguments: Callable[[Sequence[Any]], tuple[Any, ...]]
    """Takes them out of all values."""
    result: int | None
    unused: tuple[int, ...]
    """The places of values that no later step reads."""


class Program:
    """Calls, one after the other.

    Args:
        calls: The calls. What nobody reads is left out.
        inputs: How many values it is given. They have the first places.
        places: How many places there are.
        result: What it returns, a slot or several.
    """

    def __init__(
        self, calls: Sequence[Call], inputs: int, places: int, result: Slot | tuple[Slot, ...]
    ) -> None:
        self._result = result
        # What is behind the inputs when it begins: results that are not there yet, and constants,
        # so that arguments of both kinds are taken from one list.
        self._rest: list[Any] = [None] * (places - inputs)
        self._inputs = inputs
        needed = places_in(result)
        steps: list[_Step] = []
        for call in reversed(calls):
            if call.result is None or call.result in needed:
                steps.append(self._step(call, tuple(call.reads - needed)))
                needed |= call.reads
        self._steps = tuple(reversed(steps))

    def __len__(self) -> int:
        return len(self._steps)

    def __call__(self, inputs: Iterable[Any]) -> Any:
        """The result for some inputs."""
        values = [*inputs, *self._rest]
        for function, arguments, result, unused in self._steps:
            found = function(*arguments(values))
            if result is not None:
                values[result] = found
            for place in unused:
                values[place] = None
        if isinstance(self._result, Slot):
            return values[self._result.place]
        return tuple([values[x.place] for x in self._result])

    def _step(self, call: Call, unused: tuple[int, ...]) -> _Step:
        """The form in which a call is quickly made."""
        function, args = call.function, [*call.args, *call.named.values()]
        if any(places_in(x) for x in args if type(x) is not Slot):
            args = [Slot(place) for place in sorted(call.reads)]
            function = _filled(call, args)
        elif call.named:
            function = _with_names(function, tuple(call.named))
        return _Step(function, _taken([self._place(x) for x in args]), call.result, unused)

    def _place(self, argument: Any) -> int:
        """The place of an argument, a new one for a constant."""
        if type(argument) is Slot:
            return argument.place
        self._rest.append(argument)
        return self._inputs + len(self._rest) - 1


def _with_names(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function of arguments by position of which the last ones have names."""

    def call(*values: Any) -> Any:
        return function(
            *values[: -len(names)], **dict(zip(names, values[-len(names) :], strict=True))
        )

    return call


def _filled(call: Call, slots: Sequence[Slot]) -> Callable[..., Any]:
    """A call as a function of what its slots stand for, wherever they are in its arguments."""

    def fill(*values: Any) -> Any:
        by_slot = dict(zip(slots, values, strict=True))
        given = call.args, call.named
        args, named = exchange(given, lambda x: by_slot[x] if type(x) is Slot else x)
        return call.function(*args, **named)

    return fill


def _taken(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes the values at some places out of all values."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


def without_repetitions(calls: Iterable[Call], shared: Container[int]) -> list[Call]:
    """Calls of which none computes what another has computed before.

    Args:
        calls: The calls.
        shared: The places of results that may be shared: they are not changed in place, nor
            computed from what is, nor returned.
    """
    kept: list[Call] = []
    first: dict[Hashable, Slot] = {}
    same: dict[Slot, Slot] = {}

    def renamed(x: Any) -> Any:
        return same.get(x, x) if type(x) is Slot else x

    for call in calls:
        if same:
            args, named = exchange((call.args, call.named), renamed)
            call = call._replace(args=args, named=named)
        if call.result is not None and call.result in shared:
            result = Slot(call.result)
            what = call.function, call.args, call.named
            found = first.setdefault(_frozen(what), result)
            if found != result:
                same[result] = found
                continue
        kept.append(call)
    return kept


def _frozen(value: Any) -> Hashable:
    """Something that is equal for equal arguments alone, and hashable: one is not 1.0."""
    if isinstance(value, dict):
        value = tuple(value.items())
    elif isinstance(value, slice):
        value = (slice, value.start, value.stop, value.step)
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_frozen(x) for x in value])
    return type(value), repr(value) if isinstance(value, float) else value  # zeros have signs


def places_in(value: Any) -> set[int]:
    """The places of all slots in nested lists, tuples and dicts."""
    return {x.place for x in leaves(value) if type(x) is Slot}


def leaves(value: Any) -> Iterator[Any]:
    """What is in nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        for x in value:
            yield from leaves(x)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def exchange(value: Any, function: Callable[[Any], Any]) -> Any:
    """Nested lists, tuples and dicts with a function of what is in them."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [exchange(x, function) for x in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: exchange(x, function) for name, x in value.items()}
    return function(value)
