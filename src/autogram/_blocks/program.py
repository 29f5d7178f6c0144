"""Programs: calls to PyTorch that are carried out with other tensors than they were written for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        result: What it returns, a slot.
    """

    def __init__(self, calls: Sequence[Call], places: int, result: Slot) -> None:
        self._places = places
        self._result = result.place
        needed = {result.place}
        kept: list[Call] = []
        for call in reversed(calls):
            if call.result is None or call.result in needed:
                kept.append(call._replace(unused=tuple(call.reads - needed)))
                needed |= call.reads
        self._calls = tuple(reversed(kept))

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
        return values[self._result]


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
