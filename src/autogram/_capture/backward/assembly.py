"""The assembly: takes in the blocks of uses as they arrive, parameter by parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from autogram._blocks import Block, Columns, Layout, Piece, Placement, Region, Seen, check_unchanged
from autogram._capture.backward.sinks import Sink
from autogram._capture.limit import Limit, retried_with_less
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.tracked import Tracked
from autogram._capture.uses import Arrival, Contribution, Use, pull_back

# The layout of a use, from its cotangent (k, *output), or `None` where that is zero.
LayoutOf = Callable[[Use, Tensor], Placement | None]
S = TypeVar("S", bound=Sink)

# Elements of what a tap shows that is taken in at once, and of all that waits together.
_LARGE = 2**17
_FULL = 2**20


class Observer(Protocol):
    """Who is told what an assembly does."""

    def restart(self, objectives: Objectives) -> None:
        """A pass begins, and what an earlier one has shown is void."""
        ...

    def see_block(self, arrival: Arrival) -> None:
        """A use has a block for a tracked tensor."""
        ...


class _Shown(NamedTuple):
    """What a tap has shown."""

    use: Use
    layout: Placement | None
    """Where the samples lie, or ``None`` if the cotangent is zero or all is one sample."""
    saved: tuple[Tensor, ...]
    cotangent: Tensor
    seen: list[Seen]
    """These tensors, as they were when they were shown."""


@dataclass(slots=True)
class _Account:
    """What is known of one parameter."""

    parameter: Tensor
    expected: int = 0
    """How many uses have not arrived."""
    columns: Columns | None = None
    """What has arrived, from the first use until the sink takes it."""

    def open(self) -> Columns:
        """What has arrived, empty at first."""
        if self.columns is None:
            self.columns = Columns(Region.of_parameter(self.parameter))
        return self.columns


class Assembly(Generic[S]):
    """A receiver of cotangents that puts the columns of each parameter together.

    When all uses of a parameter have arrived, its columns go to the sink. How many there will be is
    known from the survey; where there may be others, all goes to the sink at the end.

    Small uses wait for one another. To take one in is a matter of many calls of Python and little
    work for PyTorch. Between the operations of a backward pass, which leave nothing of it in the
    caches of the processor, that takes up to twice as long as one use after the other.

    Args:
        channel: The channel of the taps.
        survey: The graph behind the losses.
        layout_of: Where the samples lie, or ``None`` if all is one sample.
        limit: That of the engine.
        sink: What to do with the columns of a parameter.
        observers: Who is told of each block.
    """

    def __init__(
        self,
        channel: Channel,
        survey: Survey,
        layout_of: LayoutOf | None,
        limit: Limit,
        sink: S,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._channel = channel
        self._layout_of = layout_of
        self._limit = limit
        self._sink = sink
        self._observers = observers
        self._accounts: dict[int, _Account] = {}  # by the `id` of the parameter
        self._derived: dict[Tracked, Columns] = {}
        reads = [tracked for use in survey.uses for tracked in use.reads]
        self._missing = Counter(tracked for tracked in reads if tracked.region is None)
        for tracked in reads:
            for parameter in tracked.sources:
                self._account(parameter).expected += 1
        self._is_complete = not survey.may_hide_taps
        self._waiting: list[_Shown] = []
        self._elements = 0
        self.has_arrivals = False
        self.unseen: list[Use] = []

    def __call__(self, use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        """Takes in one use, or lets it wait.

        Raises:
            UnknownLayoutError: The samples must be sought first.
        """
        self.has_arrivals = True
        layout = self._layout_of(use, cotangent) if self._layout_of else None
        seen = [(x, x._version) for x in (cotangent, *saved)]
        shown = _Shown(use, layout, saved, cotangent, seen)
        elements = sum([x.numel() for x, _ in seen])
        if elements > _LARGE or use.needs_graph:
            self._take_in(shown)
            return
        self._waiting.append(shown)
        self._elements += elements
        if self._elements > _FULL:
            self._take_in_all()

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
        self._take_in_all()
        for tracked in list(self._derived):
            self._pull_back(tracked)
        for account in self._accounts.values():
            self._finish(account)
        return self._sink

    def _take_in_all(self) -> None:
        """Takes in the uses that wait."""
        waiting, self._waiting, self._elements = self._waiting, [], 0
        for shown in waiting:
            self._take_in(shown)

    def _take_in(self, shown: _Shown) -> None:
        """Takes in one use."""
        use, layout, saved, cotangent, seen = shown
        check_unchanged(seen)
        if layout is not None or self._layout_of is None:
            self._add(use, layout, saved, cotangent)
        for tracked in use.reads:
            self._count(tracked)

    def _add(
        self, use: Use, layout: Placement | None, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> None:
        """Adds the blocks of a use to the columns of what it reads."""
        if not use.is_seen:
            self.unseen.append(use)
        # Half precision is for the network: products of gradients are accumulated in float32.
        dtype = torch.promote_types(cotangent.dtype, torch.float32)
        exact = cotangent if cotangent.dtype == dtype else cotangent.to(dtype)
        pieces = (Piece(None, None, exact),) if layout is None else layout.pieces(exact)
        for subset, within, part in pieces:
            for tracked, region, block in self._contributions(use, within, saved, part):
                for observer in self._observers:
                    arrival = Arrival(use, layout, subset, cotangent, tracked, region, block)
                    observer.see_block(arrival)
                self._columns(tracked).add(region, block, subset)

    def _columns(self, tracked: Tracked) -> Columns:
        """What has arrived for a tracked tensor: for its parameter where it is a region of one."""
        if tracked.region is not None:
            return self._account(tracked.sources[0]).open()
        columns = self._derived.get(tracked)
        if columns is None:
            columns = self._derived[tracked] = Columns(Region.contiguous(tracked.shape))
        return columns

    def _account(self, parameter: Tensor) -> _Account:
        """The account of a parameter, opened when first asked for."""
        account = self._accounts.get(id(parameter))
        if account is None:
            account = self._accounts[id(parameter)] = _Account(parameter)
        return account

    def _count(self, tracked: Tracked) -> None:
        """Counts an arrival, and finishes what has nothing left to wait for."""
        if tracked.region is None:
            self._missing[tracked] -= 1
            if not self._missing[tracked] and self._is_complete and tracked in self._derived:
                self._pull_back(tracked)
        for parameter in tracked.sources:
            account = self._account(parameter)
            account.expected -= 1
            account.open()  # and empty where every cotangent was zero
            if account.expected == 0 and self._is_complete:
                self._finish(account)

    def _pull_back(self, tracked: Tracked) -> None:
        """Moves the blocks of a derived tensor to the parameters that it is computed from."""
        columns = self._derived.pop(tracked)
        subset = columns.narrow()
        for parameter, block in self._pulled_back(tracked, columns.dense()):
            self._account(parameter).open().add(Region.of_parameter(parameter), block, subset)

    @retried_with_less
    def _contributions(
        self, use: Use, layout: Layout | None, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> list[Contribution]:
        """The blocks of a use."""
        return list(use.contributions(layout, cotangent, saved, self._limit.elements))

    @retried_with_less
    def _pulled_back(self, tracked: Tracked, rows: Tensor) -> list[tuple[Tensor, Block]]:
        """Rows of a derived tensor as blocks of the parameters that it is computed from."""
        channel, limit = self._channel, self._limit.elements
        found = pull_back(channel, tracked, rows, limit, is_batchable=channel.is_batchable)
        return list(found)

    def _finish(self, account: _Account) -> None:
        """Gives the columns of a parameter to the sink, if there are any."""
        columns, account.columns = account.columns, None
        if columns is not None:
            self._sink.take(account.parameter, columns)
