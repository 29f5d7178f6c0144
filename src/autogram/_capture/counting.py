"""Counting: by which dimension of which input the samples of a module are counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

InputSizes = Sequence[Sequence[int]]
"""The sizes of each input's dimensions in which samples may lie."""


class Counted(NamedTuple):
    """How many samples a forward pass was taken to have."""

    module: int
    """The ``id`` of the outermost module. One that is used again costs time, and no exactness."""
    inputs: InputSizes
    samples: int


class _Pass(Protocol):
    """A forward pass."""

    counted: Counted | None


class Counting:
    """By which dimension of which input samples are counted, for the modules of an engine.

    It is the first dimension of the first input, unless losses have shown that it is another one:
    models may be given a graph's edges, points in time or the names of classes first. Losses may
    also be as many as something else by accident. So each place is tried once, and left again if it
    does not help.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}  # by module: an input and its dimension
        self._tried: set[tuple[int, tuple[int, int]]] = set()
        self._proven: set[int] = set()

    def count(self, module: int, inputs: InputSizes) -> Counted:
        """How many samples inputs have. There is one where nothing is known."""
        number, dim = self._places.get(module, (len(inputs), 0))
        if number < len(inputs) and dim < len(inputs[number]):
            return Counted(module, inputs, inputs[number][dim])
        likely = (sizes[0] for sizes in inputs if sizes and sizes[0] != 1)
        return Counted(module, inputs, next(likely, 1))

    def learn(self, passes: Iterable[_Pass], samples: int, *, are_apart: bool) -> bool:
        """Notes how many samples losses had. Returns whether later passes are counted anew.

        Args:
            passes: The forward passes that the losses depend on, and what was counted in each.
            samples: How many losses there were.
            are_apart: Whether each loss was of one sample.
        """
        is_anew = False
        for counted in (of.counted for of in passes if of.counted is not None):
            module = counted.module
            if samples != counted.samples:
                is_anew |= self._tries_another(counted, samples)
            elif are_apart:
                self._proven.add(module)
            elif module not in self._proven:
                self._places.pop(module, None)
        return is_anew

    def _tries_another(self, counted: Counted, samples: int) -> bool:
        """Lets another place count that has so many samples. Returns whether there is one."""
        module, inputs = counted.module, counted.inputs
        found = [(i, d) for d in (0, 1) for i, of in enumerate(inputs) if samples in of[d : d + 1]]
        for place in found if samples > 1 else ():
            if (module, place) not in self._tried:
                self._tried.add((module, place))
                self._places[module] = place
                self._proven.discard(module)
                return True
        return False
