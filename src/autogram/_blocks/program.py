"""Programs: calls to PyTorch that are carried out with other tensors than they were written for."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    is_flat: bool
    """Whether no argument is a list with slots."""
    options: dict[str, Any]
    """Arguments by name."""
    named: dict[str, Slot]
    """Those that are slots."""
    result: int | None
    """The place of what it returns, or ``None`` if it changes something that has a place."""
    unused: tuple[int, ...] = ()
    """The places of values that no later call reads."""

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: int | None,
    ) -> Call:
        """A call with slots among its arguments."""
        lists = [x for x in args if isinstance(x, (list, tuple))]
        named = {name: x for name, x in kwargs.items() if type(x) is Slot}
        options = {name: x for name, x in kwargs.items() if name not in named}
        return cls(function, args, not places_in(lists), options, named, result)

    @property
    def reads(self) -> set[int]:
        """The places of what it is given."""
        return places_in((self.args, self.named))


class Program:
    """Calls, one after the other.

    Args:
        calls: The calls. What nobody reads is left out.
        places: How many values there are, the inputs first.
        result: What it returns, a slot or several.
    """

    def __init__(self, calls: Sequence[Call], places: int, result: Slot | tuple[Slot, ...]) -> None:
        self._places = places
        self._result = result
        needed = places_in(result)
        kept: list[Call] = []
        for call in reversed(calls):
            if call.result is None or call.result in needed:
                kept.append(call._replace(unused=tuple(call.reads - needed)))
                needed |= call.reads
        self._calls = tuple(reversed(kept))

    def __len__(self) -> int:
        return len(self._calls)

    def __call__(self, inputs: Iterable[Any]) -> Any:
        """The result for some inputs."""
        given = [*inputs]
        values = given + [None] * (self._places - len(given))
        args: Sequence[Any]
        for function, args, is_flat, options, named, result, unused in self._calls:
            if is_flat:
                args = [values[x.place] if type(x) is Slot else x for x in args]
            else:
                args = exchange(args, lambda x: values[x.place] if type(x) is Slot else x)
            if named:
                options = options | {name: values[x.place] for name, x in named.items()}
            found = function(*args, **options)
            if result is not None:
                values[result] = found
            for place in unused:
                values[place] = None
        if isinstance(self._result, Slot):
            return values[self._result.place]
        return tuple([values[x.place] for x in self._result])


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
            what = call.function, call.args, call.options, call.named
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
