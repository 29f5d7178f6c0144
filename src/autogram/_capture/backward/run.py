"""A run: one call of an engine, from losses to columns of J in sinks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from autogram._capture.autograd.cotangents import visit
from autogram._capture.autograd.graph import explaining_freed_graphs
from autogram._capture.backward.assembly import Assembly, LayoutOf
from autogram._capture.backward.diagnosis import confirm
from autogram._capture.backward.sinks import GramianSum, Sink
from autogram._capture.backward.summary import Summary
from autogram._capture.backward.unseen import use_in_tail
from autogram._capture.backward.verification import Check, Comparison, Schedule
from autogram._capture.limit import Limit
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.places import Places, UnknownLayoutError
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use
from autogram._errors import (
    CoupledObjectivesWarning,
    MixedSamplesError,
    NonFiniteError,
    NotConnectedError,
    UnverifiedWarning,
    VerificationError,
    warn_user,
)

BatchDim = int | Literal["auto"] | None


@dataclass(eq=False)
class Run:
    """One call of an engine. It makes as many passes as it needs, and dies with the call.

    Where the losses turn out not to be per-sample, the whole batch becomes one sample, if that is
    allowed.
    """

    channel: Channel
    limit: Limit
    places: Places
    """Where samples were in earlier calls."""
    schedule: Schedule
    survey: Survey
    """The graph behind the losses."""
    objectives: Objectives
    """The losses with their samples."""
    may_couple: bool = False
    """Whether the batch may become one sample."""
    check: Check | None = None
    """The verification of this call, if one is due."""
    summary: Summary | None = None
    """What is told of each block, if that is not known from an earlier call."""
    must_verify: bool = False
    """Whether it is an error that there are gradients with which nothing can be verified."""
    retain_graph: bool = True
    is_step: bool = False
    """Whether the pass stands for the user's own backward pass."""
    has_sought: bool = False
    """Whether the samples were sought, or their layouts remembered."""
    unseen: list[Use] = field(default_factory=list)
    """Uses that only the graph has shown."""

    def collect(self, *sinks: Sink) -> None:
        """Gives the columns of J for all parameters to the sinks, and verifies them if that is due.

        Raises:
            VerificationError: They are wrong.
            NotConnectedError: The losses do not depend on a recorded use of a parameter.
            MixedSamplesError: The losses are not per-sample, and must be.
            NonFiniteError: A cotangent in which the samples are sought is not finite.
        """
        if self.objectives.samples > 1:
            try:
                if self.may_couple:
                    self.places.check(self.objectives, self.survey)
                self._collect_per_sample(sinks)
            except (MixedSamplesError, VerificationError) as error:
                is_of_samples = isinstance(error, MixedSamplesError) or (
                    error.is_of_samples and not error.is_late
                )
                if not (self.may_couple and is_of_samples):
                    raise
                self.places.refuse(self.objectives, self.survey, str(error))
                self._warn(error)
            else:
                return
        self.objectives = Objectives(self.survey.losses, None)
        self._assemble(sinks, None)
        self._confirm()

    def _collect_per_sample(self, sinks: tuple[Sink, ...]) -> None:
        """Collects columns for per-sample losses, with layouts that are remembered or sought.

        A check is of this very step, with what is remembered. Only the next one looks again.
        """
        search = self.places.search(self.objectives, self.survey)
        search.begin()
        while True:
            try:
                with search.watched():
                    # Where a layout turns out to be unknown, another pass begins.
                    self._assemble(sinks, search.layout, may_repeat=not search.is_settled)
                search.finish()
                break
            except UnknownLayoutError as unknown:
                search.seek(unknown)
        self.has_sought = search.has_sought
        try:
            self._confirm()
        except VerificationError as error:
            self.places.doubt(self.objectives, self.survey)
            if search.has_sought:
                raise
            raise error.since(self.schedule.doubted) from None
        if self.check is not None and not search.has_sought:
            self.places.doubt(self.objectives, self.survey)

    def _assemble(
        self, sinks: tuple[Sink, ...], layout_of: LayoutOf | None, *, may_repeat: bool = False
    ) -> None:
        """Makes one pass past the taps, with the layouts that are known."""
        channel, objectives, survey = self.channel, self.objectives, self.survey
        observers = [x for x in (self.check, self.summary) if x is not None]
        tail = use_in_tail(channel, survey)
        start = partial(
            Assembly, channel, objectives, survey, layout_of, self.limit, sinks, observers, tail
        )
        assembly = visit(
            channel,
            objectives.losses,
            objectives.cotangents(),
            start,
            retain_graph=self.retain_graph or self.check is not None or may_repeat,
            is_step=self.is_step,
        )
        if not assembly.has_arrivals:
            raise NotConnectedError(
                "The losses do not depend on any parameter of the engine's modules that requires a "
                "gradient. Compute them from an output of these modules, with gradients enabled. A "
                "part that is checkpointed with `use_reentrant=True` hides its parameters: pass "
                "`use_reentrant=False`."
            )
        assembly.complete()
        self.unseen = assembly.unseen

    def _confirm(self) -> None:
        """Raises if the columns are wrong, as far as a check shows it."""
        if self.check is None:
            return
        in_whole = None if self.objectives.samples == 1 else self._differing_in_whole
        try:
            confirm(self.check, self.channel, in_whole)
        except NonFiniteError as error:
            if self.must_verify:
                raise
            warn_user(str(error), UnverifiedWarning)
            self.schedule.postpone()
        else:
            self.schedule.confirm()

    def _differing_in_whole(self, check: Check) -> list[Comparison]:
        """What differs if the losses are one objective of one sample, which needs no layouts."""
        with torch.enable_grad():
            total = (check.losses * check.vector).sum()
        survey = survey_of(self.channel, total)
        whole = Check(survey, torch.ones_like(total))
        objectives = Objectives(total, None)
        run = Run(
            self.channel, self.limit, self.places, self.schedule, survey, objectives, check=whole
        )
        run._assemble((GramianSum(self.limit, whole),), None)
        return whole.differing(whole.compare(self.channel))

    def _warn(self, error: Exception) -> None:
        """Tells the user, once, that the whole batch is treated as one sample."""
        if "coupled" in self.channel.told:
            return
        self.channel.told.add("coupled")
        samples = self.objectives.samples
        sizes = {n for recording in self.channel.recordings for n in recording.sizes}
        if sizes and samples not in sizes:
            message = (
                f"There are {samples} losses, and no input of the modules has as many "
                "samples: each loss depends on the whole batch, as those of several tasks do. They "
                "are treated so, which is exact. Say so by `batch_dim=None` to `Engine`."
            )
        else:
            message = (
                f"The objectives are treated as coupled, which is exact and slower. {error} To "
                "treat them so without this warning, also pass `batch_dim=None`."
            )
        warn_user(message, CoupledObjectivesWarning)


def survey_of(channel: Channel, losses: Tensor) -> Survey:
    """The graph behind some losses.

    Raises:
        FreedGraphError: It was freed by an earlier backward pass.
    """
    with explaining_freed_graphs():
        return Survey.of(channel, losses)
