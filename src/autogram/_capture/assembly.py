"""The assembly: takes in the blocks of uses as they arrive, parameter by parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from autogram._blocks import Columns, Layout, Region
from autogram._capture.objectives import Objectives
from autogram._capture.recording import Channel
from autogram._capture.sinks import Sink
from autogram._capture.tracked import Tracked
from autogram._capture.use import Arrival, Use, pull_back

# The layout of a use, from its cotangent (k, *output), or `None` where that is zero.
LayoutOf = Callable[[Use, Tensor], Layout | None]
S = TypeVar("S", bound=Sink)


class Observer(Protocol):
    """Who is told what an assembly does."""

    def restart(self, objectives: Objectives) -> None:
        """A pass begins, and what an earlier one has shown is void."""
        ...

    def see_block(self, arrival: Arrival) -> None:
        """A use has a block for a tracked tensor."""
        ...


class Assembly(Generic[S]):
    """A receiver of cotangents that puts the columns of each parameter together.

    When all uses of a parameter have arrived, its columns go to the sink. How many there will be is
    known from the recordings that are alive; where some of their uses do not reach the losses, what
    waits for them goes to the sink at the end.

    Args:
        channel: The channel of the taps.
        layout_of: Where the samples lie, or ``None`` if all is one sample.
        limit: The number of elements that one intermediate result may have.
        sink: What to do with the columns of a parameter.
        observers: Who is told of each block.
    """

    def __init__(
        self,
        channel: Channel,
        layout_of: LayoutOf | None,
        limit: int,
        sink: S,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._channel = channel
        self._layout_of = layout_of
        self._limit = limit
        self._sink = sink
        self._observers = observers
        self._columns: dict[Tensor, Columns] = {}
        self._derived: dict[Tracked, Columns] = {}
        self._arrived: Counter[Tracked] = Counter()
        self._expected: Counter[Tensor] = Counter()
        for recording in channel.recordings:
            self._expected.update(recording.uses)
        self.has_arrivals = False
        self.unseen: list[Use] = []

    def __call__(self, use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        """Takes in one use."""
        self.has_arrivals = True
        if self._layout_of is None:
            self._add(use, None, saved, cotangent)
        elif layout := self._layout_of(use, cotangent):
            self._add(use, layout, saved, cotangent)
        for tracked in use.reads:
            self._count(tracked)

    def add_tail(self, use: Use, objectives: Objectives) -> None:
        """Adds what parameters contribute that the losses reach past every tap.

        Args:
            use: The losses, as a use of these parameters.
            objectives: The losses with their samples.
        """
        self.has_arrivals = True
        self._add(use, objectives.layout, (), objectives.cotangents())

    def complete(self) -> S:
        """The sink, after it was given what still waited."""
        for tracked in list(self._derived):
            self._pull_back(tracked)
        for parameter in list(self._columns):
            self._finish(parameter)
        return self._sink

    def _add(
        self, use: Use, layout: Layout | None, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> None:
        """Adds the blocks of a use to the columns of what it reads."""
        if not use.is_seen:
            self.unseen.append(use)
        # Half precision is for the network: products of gradients are accumulated in float32.
        dtype = torch.promote_types(cotangent.dtype, torch.float32)
        blocks = use.contributions(layout, cotangent.to(dtype), saved, self._limit)
        for tracked, region, block in blocks:
            for observer in self._observers:
                observer.see_block(Arrival(use, layout, cotangent, tracked, region, block))
            if tracked.region is not None:
                self._columns_of(tracked.sources[0]).add(region, block)
            else:
                columns = self._derived.get(tracked)
                if columns is None:
                    columns = self._derived[tracked] = Columns(Region.contiguous(tracked.shape))
                columns.add(region, block)

    def _columns_of(self, parameter: Tensor) -> Columns:
        """The columns of a parameter, made when first asked for."""
        columns = self._columns.get(parameter)
        if columns is None:
            columns = self._columns[parameter] = Columns(Region.of_parameter(parameter))
        return columns

    def _count(self, tracked: Tracked) -> None:
        """Counts an arrival, and finishes what has nothing left to wait for."""
        self._arrived[tracked] += 1
        if tracked in self._derived and self._arrived[tracked] == tracked.uses:
            self._pull_back(tracked)
        for parameter in tracked.sources:
            self._expected[parameter] -= 1
            self._columns_of(parameter)  # empty where every cotangent was zero
            if self._expected[parameter] == 0:
                self._finish(parameter)

    def _pull_back(self, tracked: Tracked) -> None:
        """Moves the blocks of a derived tensor to the parameters that it is computed from."""
        rows = self._derived.pop(tracked).dense()
        is_batchable = all(recording.is_batchable for recording in self._channel.recordings)
        with self._channel.blocking():
            pulled = pull_back(tracked, rows, self._limit, is_batchable=is_batchable)
            for parameter, block in pulled:
                self._columns_of(parameter).add(Region.of_parameter(parameter), block)

    def _finish(self, parameter: Tensor) -> None:
        """Gives the columns of a parameter to the sink."""
        self._sink.take(parameter, self._columns.pop(parameter))
