"""The driver: what an engine asks the backward side for, and what it remembers between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from autogram._blocks import Arena, Columns, Keep
from autogram._capture.autograd.exact import exact
from autogram._capture.backward.run import BatchDim, Run, survey_of
from autogram._capture.backward.sinks import GramianSum, KeptColumns, Sink
from autogram._capture.backward.summary import Summary
from autogram._capture.backward.unseen import Unseen, mention
from autogram._capture.backward.verification import Schedule, Verify
from autogram._capture.limit import Limit, retried_with_less
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.places import REMEMBERED, Places


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
        verify: Verify = "first",
        unseen: Unseen = "rows",
    ) -> None:
        self._channel = channel
        self._batch_dim = batch_dim
        self._limit = limit
        self._on_unseen: Unseen = unseen
        self._places = Places(channel)
        self._schedule = Schedule(verify, REMEMBERED)
        self.summary = Summary(limit)

    @retried_with_less
    def gramian(self, losses: Tensor, *, verify: bool = False) -> Tensor:
        """The Gramian of the losses, ``(m, m)``.

        Args:
            losses: The objectives.
            verify: Whether to verify this call, whatever is due, and to raise where that cannot be
                done.

        Raises:
            VerificationError: It was verified, and is wrong.
            NotConnectedError: The losses do not depend on a recorded use of a parameter.
            MixedSamplesError: ``batch_dim`` is a dimension, and the losses are not per-sample.
            NonFiniteError: A cotangent in which the samples are sought is not finite.
            FreedGraphError: The graph was freed by an earlier backward pass.
        """
        with exact(losses.device):
            run = self._run(losses, must_verify=verify)
            total = GramianSum(self._limit, run.check)
            self._collect(run, total)
            return total.gramian

    @retried_with_less
    def columns(self, losses: Tensor, form: Keep) -> tuple[Objectives, KeptColumns]:
        """The columns of J, kept, and the objectives that their rows belong to.

        Raises:
            NotConnectedError: As for the Gramian, and so are the others.
        """
        with exact(losses.device):
            run = self._run(losses)
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

        Raises:
            NotConnectedError: As for the Gramian, and so are the others.
        """
        with exact(losses.device):
            run = self._run(losses, is_step=True)
            leaves = run.survey.leaves
            inside = self._channel.parameters(leaves)
            outside = [leaf for leaf in leaves if leaf not in inside]
            run.retain_graph = retain_graph or bool(outside)
            kept = KeptColumns(form, self._limit, run.check, arena)
            total = GramianSum(self._limit)
            self._collect(run, kept, total)
            return StepParts(run.objectives, kept.columns, total.gramian, outside)

    def _run(self, losses: Tensor, *, must_verify: bool = False, is_step: bool = False) -> Run:
        """One call, before any pass."""
        survey = survey_of(self._channel, losses)
        is_auto = self._batch_dim == "auto"
        batch_dim = 0 if self._batch_dim == "auto" else self._batch_dim
        return Run(
            self._channel,
            self._limit,
            self._places,
            self._schedule,
            survey,
            Objectives(losses, batch_dim if losses.dim() else None),
            may_couple=is_auto,
            check=self._schedule.next(survey, must=must_verify),
            summary=None if survey.key == self.summary.key else Summary(self._limit, survey.key),
            must_verify=must_verify,
            is_step=is_step,
        )

    def _collect(self, run: Run, *sinks: Sink) -> None:
        """Fills the sinks, remembers what was done, and tells the user of unseen uses."""
        run.collect(*sinks)
        if run.summary is not None:
            self.summary = run.summary
            for recording in self._channel.recordings:
                names = recording.names.items()
                self.summary.names.update({name: p.requires_grad for p, name in names})
        self.summary.has_sought = run.has_sought
        mention(self._channel, run.unseen, run.survey.losses.numel(), self._on_unseen)


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
