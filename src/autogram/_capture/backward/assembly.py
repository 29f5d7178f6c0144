"""One pass: takes in the blocks of uses as they arrive, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from autogram._blocks import Block, Columns, Devices, Layout, Placement, Region, pieces
from autogram._capture.autograd.cotangents import visit
from autogram._capture.backward.sink import Sink
from autogram._capture.backward.summary import Summary
from autogram._capture.backward.unseen import use_in_tail
from autogram._capture.backward.verification import Check
from autogram._capture.limit import Limit, retried_with_less
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.tracked import Tracked
from autogram._capture.uses import Contribution, Use, pull_back
from autogram._errors import NotConnectedError

# The layout of a use, from its cotangent (k, *output), or `None` where that is zero.
LayoutOf = Callable[[Use, Tensor], Placement | None]


@dataclass(eq=False)
class Run:
    """One call of an engine, which makes as many passes as it needs. It dies with the call."""

    channel: Channel
    limit: Limit
    devices: Devices
    survey: Survey
    objectives: Objectives
    sink: Sink
    check: Check | None
    """The verification of this call, if one is due."""
    summary: Summary | None = None
    """What is told of each block, if that is not known from an earlier call."""
    must_verify: bool = False
    """Whether it is an error that there are gradients with which nothing can be verified."""
    retain_graph: bool = True
    """Whether the graph is needed when the columns are there."""
    is_step: bool = False
    """Whether the pass stands for the user's own backward pass."""
    has_sought: bool = False
    """Whether the samples were sought, or their layouts remembered."""
    unseen: list[Use] = field(default_factory=list)
    """Uses that only the graph has shown."""

    def assemble(self, layout_of: LayoutOf | None, *, retain_graph: bool) -> None:
        """Makes one pass past the taps, which gives the columns of all parameters to the sink.

        Args:
            layout_of: Where the samples lie, or ``None`` if all is one sample.
            retain_graph: Whether another pass may follow.

        Raises:
            NotConnectedError: The losses depend on no use of a parameter.
        """
        assembly = visit(
            self.channel,
            self.objectives.losses,
            self.objectives.cotangents(),
            lambda: Assembly(self, layout_of),
            retain_graph=retain_graph,
            is_step=self.is_step,
        )
        assembly.complete()


@dataclass(slots=True)
class _Account:
    """What has arrived for a parameter, or for a tensor that is derived from parameters."""

    owner: Tensor | Tracked
    columns: Columns | None
    """What has arrived, until it is complete."""
    expected: int = 0
    """How many uses, and derived tensors, have not arrived."""
    is_reached: bool = False
    """Whether one has arrived, be it without a cotangent."""
    has_blocks: bool = False


class Assembly:
    """A receiver of cotangents, for one pass, that puts the columns of each parameter together.

    When all uses of a parameter have arrived, its columns go to the sink. How many there will be is
    known from the survey; where there may be others, all go to the sink at the end.
    """

    def __init__(self, run: Run, layout_of: LayoutOf | None) -> None:
        self._run = run
        self._limit = run.limit
        self._layout_of = layout_of
        self._accounts: dict[int, _Account] = {}  # by the `id` of the owner
        for use in run.survey.uses:
            for tracked in use.reads:
                self._account(tracked).expected += 1
        self._is_complete = not run.survey.may_hide_taps
        run.unseen.clear()
        for listener in (run.check, run.summary):
            if listener is not None:
                listener.restart(run.objectives)
        run.sink.restart(run.objectives, run.check)
        tail = use_in_tail(run.channel, run.survey)
        self._has_arrivals = tail is not None
        if tail is not None:
            self._add(tail, run.objectives.layout, (), run.objectives.cotangents())

    def __call__(self, use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        """Takes in one use.

        Raises:
            UnknownLayoutError: The samples must be sought first.
        """
        self._has_arrivals = True
        layout = self._layout_of(use, cotangent) if self._layout_of else None
        if layout is not None or self._layout_of is None:
            self._add(use, layout, saved, cotangent)
        for tracked in use.reads:
            self._count(self._account(tracked))

    def complete(self) -> None:
        """Gives the sink what still waits for other uses.

        Raises:
            NotConnectedError: No use has arrived.
        """
        if not self._has_arrivals:
            raise NotConnectedError(
                "The losses do not depend on any parameter of the engine's modules that requires a "
                "gradient. Compute them from an output of these modules, with gradients enabled. A "
                "part that is checkpointed with `use_reentrant=True` hides its parameters: pass "
                "`use_reentrant=False`."
            )
        for account in sorted(self._accounts.values(), key=lambda x: isinstance(x.owner, Tensor)):
            self._finish(account)  # those of derived tensors first
        self._run.sink.finish()

    def _add(
        self, use: Use, layout: Placement | None, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> None:
        """Adds the blocks of a use to the columns of what it reads."""
        run = self._run
        if not use.is_seen:
            run.unseen.append(use)
        if run.check is not None:
            run.check.see_use(use, cotangent)
        for subset, within, part in pieces(layout, cotangent):
            for found in self._contributions(use, within, saved, part):
                if run.summary is not None:
                    run.summary.add(use, layout, subset, found)
                tracked, region, block = found
                account = self._account(tracked)
                account.is_reached = account.has_blocks = True
                assert account.columns is not None
                account.columns.add(region, block, subset)

    def _account(self, owner: Tensor | Tracked) -> _Account:
        """The account of a parameter or a derived tensor, opened when first asked for.

        That of a region of a parameter is the parameter's.
        """
        if isinstance(owner, Tracked) and owner.region is not None:
            owner = owner.sources[0]
        account = self._accounts.get(id(owner))
        if account is None:
            if isinstance(owner, Tracked):
                region, device = Region.contiguous(owner.shape), owner.sources[0].device
                for parameter in owner.sources:
                    self._account(parameter).expected += 1
            else:
                region, device = Region.of_parameter(owner), owner.device
            columns = Columns(region, self._run.devices.on(device))
            account = self._accounts[id(owner)] = _Account(owner, columns)
        return account

    def _count(self, account: _Account) -> None:
        """Counts an arrival, and finishes what has nothing left to wait for."""
        account.is_reached = True
        account.expected -= 1
        if account.expected == 0 and self._is_complete:
            self._finish(account)

    def _finish(self, account: _Account) -> None:
        """Gives the columns of a parameter to the sink, those of a derived tensor to parameters.

        Where no use of it has arrived, there is nothing to give.
        """
        owner, columns, account.columns = account.owner, account.columns, None
        if columns is None or not account.is_reached:
            return
        if isinstance(owner, Tensor):
            self._run.sink.take(owner, columns)
            return
        if account.has_blocks:
            subset = columns.narrow()
            for parameter, block in self._pulled_back(owner, columns.dense()):
                of_parameter = self._account(parameter).columns
                assert of_parameter is not None
                of_parameter.add(Region.of_parameter(parameter), block, subset)
        for parameter in owner.sources:
            self._count(self._account(parameter))

    @retried_with_less
    def _contributions(
        self, use: Use, layout: Layout | None, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> list[Contribution]:
        """The blocks of a use."""
        return list(use.contributions(layout, cotangent, saved, self._limit.elements))

    @retried_with_less
    def _pulled_back(self, tracked: Tracked, rows: Tensor) -> list[tuple[Tensor, Block]]:
        """Rows of a derived tensor as blocks of the parameters that it is computed from."""
        channel, limit = self._run.channel, self._limit.elements
        return list(pull_back(channel, tracked, rows, limit))
