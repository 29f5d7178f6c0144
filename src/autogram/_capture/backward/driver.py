"""The driver: what an engine asks the backward side for, and what it remembers between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch import Tensor

from autogram._blocks import Arena, Columns, Devices, Keep
from autogram._capture.autograd.exact import exact
from autogram._capture.autograd.graph import explaining_freed_graphs
from autogram._capture.backward.assembly import Run
from autogram._capture.backward.diagnosis import confirm, tell_of_coupling
from autogram._capture.backward.sinks import GramianSum, KeptColumns, Sink
from autogram._capture.backward.summary import Summary
from autogram._capture.backward.unseen import Unseen, tell_of_unseen
from autogram._capture.backward.verification import Schedule, Verify
from autogram._capture.limit import Limit, retried_with_less
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.remembered import REMEMBERED, Remembered
from autogram._capture.samples.search import Search, UnknownLayoutError
from autogram._capture.samples.survey import Survey
from autogram._errors import (
    MixedSamplesError,
    NonFiniteError,
    UnverifiedWarning,
    VerificationError,
    warn_user,
)

BatchDim = int | Literal["auto"] | None


class StepParts(NamedTuple):
    """What a whole backward pass needs to know of some losses."""

    objectives: Objectives
    """What the rows of the columns belong to."""
    columns: Mapping[Tensor, Columns]
    """Those of each parameter."""
    gramian: Tensor
    outside: list[Tensor]
    """The leaves that the losses depend on, less the parameters of the engine's modules."""


class Driver:
    """Runs backward passes for one engine, and remembers the layouts that it found.

    Args:
        channel: The channel of the engine's taps.
        batch_dim: The dimension of the losses that counts the samples, ``None`` for one sample, or
            ``"auto"`` to find out.
        limit: What the engine and its Jacobians share.
        devices: How to contract blocks.
        verify: When to compare with an ordinary backward pass.
        unseen: Whether to refuse parameters that are used where nothing is recorded.

    Attributes:
        summary: What the last call did.
    """

    def __init__(
        self,
        channel: Channel,
        batch_dim: BatchDim,
        limit: Limit,
        devices: Devices,
        verify: Verify = "first",
        unseen: Unseen = "rows",
    ) -> None:
        self._channel = channel
        self._batch_dim = batch_dim
        self._limit = limit
        self._devices = devices
        self._on_unseen: Unseen = unseen
        self._remembered = Remembered(channel)
        self._schedule = Schedule(verify, REMEMBERED)
        self.summary = Summary(limit)

    @retried_with_less
    def gramian(self, losses: Tensor, *, verify: bool = False) -> Tensor:
        """The Gramian of the losses, ``(m, m)``.

        Args:
            losses: The objectives.
            verify: Whether to verify this call, whatever is due, and to raise where that cannot be
                done.
        """
        with exact(losses.device):
            run = self._begin(losses, verify=verify)
            total = GramianSum(self._limit, run.check)
            self._collect(run, total)
            return total.gramian

    @retried_with_less
    def columns(self, losses: Tensor, form: Keep) -> tuple[Objectives, KeptColumns]:
        """The columns of J, kept, and the objectives that their rows belong to."""
        with exact(losses.device):
            run = self._begin(losses)
            kept = KeptColumns(form, self._limit, run.check)
            self._collect(run, kept)
            return run.objectives, kept

    @retried_with_less
    def step(
        self, losses: Tensor, form: Keep, arena: Arena | None, *, retain_graph: bool
    ) -> StepParts:
        """The columns of J and the Gramian, and what else there is to differentiate.

        Args:
            losses: The losses.
            form: Whether to keep factors or rows.
            arena: Where to put rows.
            retain_graph: Whether the graph is needed after the pass. If not, and there are no
                other leaves, it is freed on the way, unless samples may have to be sought yet.
        """
        with exact(losses.device):
            run = self._begin(losses, is_step=True)
            leaves = run.survey.leaves
            inside = self._channel.parameters(leaves)
            outside = [leaf for leaf in leaves if leaf not in inside]
            run.retain_graph = retain_graph or bool(outside) or run.check is not None
            kept = KeptColumns(form, self._limit, run.check, arena)
            total = GramianSum(self._limit)
            self._collect(run, kept, total)
            return StepParts(run.objectives, kept.columns, total.gramian, outside)

    def _begin(self, losses: Tensor, *, verify: bool = False, is_step: bool = False) -> Run:
        """One call, before its first pass."""
        with explaining_freed_graphs():
            survey = Survey(self._channel, losses)
        batch_dim = 0 if self._batch_dim == "auto" else self._batch_dim
        return Run(
            self._channel,
            self._limit,
            self._devices,
            survey,
            Objectives(losses, batch_dim if losses.dim() else None),
            self._schedule.next(survey, must=verify),
            None if survey.key == self.summary.key else Summary(self._limit, survey.key),
            must_verify=verify,
            is_step=is_step,
        )

    def _collect(self, run: Run, *sinks: Sink) -> None:
        """Fills the sinks, verified where that is due, and remembers what was done."""
        run.sinks = sinks
        if run.objectives.samples == 1 or not self._collect_per_sample(run):
            run.objectives = Objectives(run.survey.losses, None)
            run.assemble(None, retain_graph=run.retain_graph)
            self._confirm(run)
        if run.summary is not None:
            self.summary = run.summary
            for recording in self._channel.recordings:
                names = recording.names.items()
                self.summary.names.update({name: p.requires_grad for p, name in names})
        self.summary.has_sought = run.has_sought
        if run.unseen:
            tell_of_unseen(self._channel, run.unseen, run.survey.losses.numel(), self._on_unseen)

    def _collect_per_sample(self, run: Run) -> bool:
        """Fills the sinks if the losses are per-sample. If not, the whole batch is one sample."""
        is_auto = self._batch_dim == "auto"
        search = Search(self._remembered, run.objectives, run.survey)
        try:
            self._search(run, search)
        except (MixedSamplesError, VerificationError) as error:
            is_of_samples = isinstance(error, MixedSamplesError) or (
                error.is_of_samples and not error.is_late
            )
            if not (is_auto and is_of_samples):
                raise
            search.refuse(str(error))
            tell_of_coupling(self._channel, run.objectives.samples, error)
            return False
        return True

    def _search(self, run: Run, search: Search) -> None:
        """Makes passes until one has found every layout known, and verifies that one.

        A check is of this very step, with what is remembered. Only the next one looks again.
        """
        search.begin()
        while True:
            try:
                must_retain = run.retain_graph or not search.knows_all
                with search.watched():
                    run.assemble(search.layout, retain_graph=must_retain)
                search.finish()
                break
            except UnknownLayoutError as unknown:
                search.seek(unknown.use)
        run.has_sought = search.has_sought
        try:
            self._confirm(run)
        except VerificationError as error:
            search.doubt()
            if search.has_sought:
                raise
            raise error.since(self._schedule.doubted) from None
        if run.check is not None and not search.has_sought:
            search.doubt()

    def _confirm(self, run: Run) -> None:
        """Raises if what the sinks have is wrong, as far as a check shows it."""
        if run.check is None:
            return
        try:
            confirm(run, run.check)
        except NonFiniteError as error:
            if run.must_verify:
                raise
            warn_user(str(error), UnverifiedWarning)
            self._schedule.postpone()
        else:
            self._schedule.confirm()


class Drivers:
    """The drivers of an engine, which serve one call at a time each.

    Calls one after the other have the same one, whichever thread they come from, and so they share
    what it remembers. Calls at the same time, in several threads or inside of one another, have
    different ones, which learn on their own. None waits for another.

    Args:
        make: Makes a driver.

    Attributes:
        last: The driver of the last call that has ended.
    """

    def __init__(self, make: Callable[[], Driver]) -> None:
        self._make = make
        self.last = make()
        self._idle = [self.last]

    @contextmanager
    def one(self) -> Iterator[Driver]:
        """A driver for one call."""
        try:
            driver = self._idle.pop()
        except IndexError:
            driver = self._make()
        try:
            yield driver
        finally:
            self.last = driver
            self._idle.append(driver)
