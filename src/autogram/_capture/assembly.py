"""The assembly: takes in the blocks of uses as they arrive, parameter by parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Account:
    """What is known of one parameter."""

    expected: int = 0
    """How many uses have not arrived."""
    columns: Columns | None = None
    """What has arrived, from the first use until the sink takes it."""


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
        self._accounts: dict[Tensor, _Account] = {}
        self._derived: dict[Tracked, Columns] = {}
        self._arrived: Counter[Tracked] = Counter()
        for recording in channel.recordings:
            for parameters in recording.reads:
                for parameter in parameters:
                    self._account(parameter).expected += 1
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
        for parameter, account in self._accounts.items():
            self._finish(parameter, account)
        return self._sink

    def _add(
        self, use: Use, layout: Layout | None, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> None:
        """Adds the blocks of a use to the columns of what it reads."""
        if not use.is_seen:
            self.unseen.append(use)
        # Half precision is for the network: products of gradients are accumulated in float32.
        dtype = torch.promote_types(cotangent.dtype, torch.float32)
        exact = cotangent if cotangent.dtype == dtype else cotangent.to(dtype)
        blocks = use.contributions(layout, exact, saved, self._limit)
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

    def _account(self, parameter: Tensor) -> _Account:
        """The account of a parameter, opened when first asked for."""
        account = self._accounts.get(parameter)
        if account is None:
            account = self._accounts[parameter] = _Account()
        return account

    def _columns_of(self, parameter: Tensor) -> Columns:
        """The columns of a parameter, made when first asked for."""
        return _columns_in(self._account(parameter), parameter)

    def _count(self, tracked: Tracked) -> None:
        """Counts an arrival, and finishes what has nothing left to wait for."""
        if tracked.region is None:
            self._arrived[tracked] += 1
            if tracked in self._derived and self._arrived[tracked] == tracked.uses:
                self._pull_back(tracked)
        for parameter in tracked.sources:
            account = self._account(parameter)
            account.expected -= 1
            _columns_in(account, parameter)  # empty where every cotangent was zero
            if account.expected == 0:
                self._finish(parameter, account)

    def _pull_back(self, tracked: Tracked) -> None:
        """Moves the blocks of a derived tensor to the parameters that it is computed from."""
        rows = self._derived.pop(tracked).dense()
        is_batchable = all(recording.is_batchable for recording in self._channel.recordings)
        with self._channel.blocking():
            pulled = pull_back(tracked, rows, self._limit, is_batchable=is_batchable)
            for parameter, block in pulled:
                self._columns_of(parameter).add(Region.of_parameter(parameter), block)

    def _finish(self, parameter: Tensor, account: _Account) -> None:
        """Gives the columns of a parameter to the sink, if there are any."""
        columns, account.columns = account.columns, None
        if columns is not None:
            self._sink.take(parameter, columns)


def _columns_in(account: _Account, parameter: Tensor) -> Columns:
    """The columns in the account of a parameter."""
    if account.columns is None:
        account.columns = Columns(Region.of_parameter(parameter))
    return account.columns
