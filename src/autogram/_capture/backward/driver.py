"""The driver: from losses to the columns of J, by one backward pass through the activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from autogram._blocks import Arena, Columns, Keep
from autogram._capture.autograd.exact import exact
from autogram._capture.autograd.graph import explaining_freed_graphs
from autogram._capture.backward.assembly import Assembly, LayoutOf, Observer
from autogram._capture.backward.diagnosis import confirm
from autogram._capture.backward.record import Record
from autogram._capture.backward.sinks import GramianSum, Sink, Store, StoreWithGramian
from autogram._capture.backward.unseen import Unseen, describe_unseen, use_in_tail
from autogram._capture.backward.verification import Check, Comparison, Schedule, Verify
from autogram._capture.limit import Limit, retried_with_less
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.remembered import REMEMBERED, Remembered
from autogram._capture.samples.search import Search, UnknownLayoutError
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use
from autogram._capture.visit import visit
from autogram._errors import (
    AutogramError,
    CoupledObjectivesWarning,
    MixedSamplesError,
    NonFiniteError,
    NotConnectedError,
    UnseenUseError,
    UnseenUseWarning,
    UnverifiedWarning,
    VerificationError,
    warn_user,
)

BatchDim = int | Literal["auto"] | None
S = TypeVar("S", bound=Sink)


@dataclass(frozen=True)
class Job(Generic[S]):
    """What to do with the columns of J, and who looks on."""

    make_sink: Callable[[Check | None], S]
    check: Check | None = None
    record: Record | None = None
    must_verify: bool = False
    retain_graph: bool = True
    is_step: bool = False

    @property
    def observers(self) -> list[Observer]:
        """Who is told of each block."""
        return [observer for observer in (self.check, self.record) if observer is not None]


class Step(NamedTuple):
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
        record: What the last call did.
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
        self._remembered = Remembered(channel)
        self._schedule = Schedule(verify, REMEMBERED)
        self.record = Record(limit)
        self._recorded: bytes | None = None
        self._on_unseen = unseen
        self._unseen: list[Use] = []
        self._has_sought = False

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
            make_sink = partial(GramianSum, self._limit)
            objectives, found = self._collect(self._survey(losses), make_sink, verify=verify)
            return found.arranged(objectives)

    @retried_with_less
    def columns(self, losses: Tensor, form: Keep) -> tuple[Objectives, Store]:
        """The columns of J, kept, and the objectives that their rows belong to.

        Raises:
            NotConnectedError: As for the Gramian, and so are the others.
        """
        with exact(losses.device):
            return self._collect(self._survey(losses), partial(Store, form, self._limit))

    @retried_with_less
    def step(self, losses: Tensor, form: Keep, arena: Arena | None, *, retain_graph: bool) -> Step:
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
            survey = self._survey(losses)
            inside = self._channel.parameters(survey.leaves)
            outside = [leaf for leaf in survey.leaves if leaf not in inside]
            make_sink = partial(StoreWithGramian, form, self._limit, arena=arena)
            objectives, store = self._collect(
                survey, make_sink, retain_graph=retain_graph or bool(outside), is_step=True
            )
            gramian = store.gramian.arranged(objectives)
            return Step(objectives, store.columns, gramian, outside)

    def _survey(self, losses: Tensor) -> Survey:
        """The graph behind some losses."""
        with explaining_freed_graphs():
            return Survey(self._channel, losses)

    def _collect(
        self,
        survey: Survey,
        make_sink: Callable[[Check | None], S],
        *,
        verify: bool = False,
        retain_graph: bool = True,
        is_step: bool = False,
    ) -> tuple[Objectives, S]:
        """The columns of J for all parameters, verified and recorded where that is due."""
        losses = survey.losses
        batch_dim = 0 if self._batch_dim == "auto" else self._batch_dim
        objectives = Objectives(losses, batch_dim if losses.dim() else None)
        check = self._schedule.next(survey, must=verify)
        record = Record(self._limit) if survey.key != self._recorded else None
        self._has_sought = False
        must_retain = retain_graph or check is not None
        job = Job(make_sink, check, record, verify, must_retain, is_step)
        found = self._assemble_or_retreat(objectives, survey, job)
        if record is not None:
            record.finish(self._channel.recordings)
            self.record, self._recorded = record, survey.key
        self.record.has_sought = self._has_sought
        self._mention_unseen(losses.numel())
        return found

    def _mention_unseen(self, objectives: int) -> None:
        """Tells the user, once, of parameters that are used unseen, or refuses them."""
        uses, self._unseen = self._unseen, []
        told = self._channel.told
        if not uses or ("unseen" in told and self._on_unseen == "rows"):
            return
        told.add("unseen")
        message = describe_unseen(uses, objectives)
        if self._on_unseen == "error":
            raise UnseenUseError(f'{message} To compute it so, pass `unseen="rows"` to `Engine`.')
        warn_user(message, UnseenUseWarning)

    def _assemble_or_retreat(
        self, objectives: Objectives, survey: Survey, job: Job[S]
    ) -> tuple[Objectives, S]:
        """The columns of J with samples, or without where there are none."""
        if objectives.samples > 1:
            search = Search(self._remembered, objectives, survey)
            try:
                return objectives, self._assemble_per_sample(objectives, survey, job, search)
            except MixedSamplesError as error:
                if self._batch_dim != "auto":
                    raise
                search.refuse(str(error))
                self._warn(error, objectives)
            except VerificationError as error:
                if self._batch_dim != "auto" or not error.is_of_samples or error.is_late:
                    raise
                search.refuse(str(error))
                self._warn(error, objectives)
        objectives = Objectives(objectives.losses, None)
        sink = self._assemble(objectives, survey, None, job, job.retain_graph)
        self._confirm(objectives, sink, job)
        return objectives, sink

    def _confirm(self, objectives: Objectives, sink: S, job: Job[S]) -> None:
        """Raises if what a sink has is wrong, as far as a check shows it."""
        if job.check is None:
            return
        gramian = sink.arranged(objectives) if isinstance(sink, GramianSum) else None
        in_whole = None if objectives.samples == 1 else self._differing_in_whole
        try:
            confirm(gramian, job.check, self._channel, in_whole)
        except NonFiniteError as error:
            if job.must_verify:
                raise
            warn_user(str(error), UnverifiedWarning)
            self._schedule.postpone()
        else:
            self._schedule.confirm()

    def _differing_in_whole(self, check: Check) -> list[Comparison]:
        """What differs if the losses are one objective of one sample: no places."""
        with torch.enable_grad():
            total = (check.losses * check.vector).sum()
        survey = self._survey(total)
        whole = Check(survey, torch.ones_like(total))
        job = Job(partial(GramianSum, self._limit), whole)
        self._assemble(Objectives(total, None), survey, None, job, retain_graph=True)
        return whole.differing(whole.compare(self._channel))

    def _assemble_per_sample(
        self, objectives: Objectives, survey: Survey, job: Job[S], search: Search
    ) -> S:
        """The columns for per-sample losses, after a look for the samples where it is needed.

        A check is of this very step, with what is remembered. Only the next one looks again.
        """
        sink = self._search(objectives, survey, job, search)
        try:
            self._confirm(objectives, sink, job)
        except VerificationError as error:
            search.doubt()
            if search.has_sought:
                raise
            raise error.since(self._schedule.doubted) from None
        if job.check is not None and not search.has_sought:
            search.doubt()
        return sink

    def _search(self, objectives: Objectives, survey: Survey, job: Job[S], search: Search) -> S:
        """The columns for per-sample losses, in as many passes as a search needs."""
        search.begin()
        while True:
            # Where a layout turns out to be unknown, another pass begins.
            must_retain = job.retain_graph or not search.knows_all
            try:
                with search.watched():
                    sink = self._assemble(objectives, survey, search.layout, job, must_retain)
                search.finish()
            except UnknownLayoutError as unknown:
                search.seek(unknown)
            else:
                self._has_sought = search.has_sought
                return sink

    def _assemble(
        self,
        objectives: Objectives,
        survey: Survey,
        layout_of: LayoutOf | None,
        job: Job[S],
        retain_graph: bool,
    ) -> S:
        """One pass past the taps, with the layouts that are known."""
        in_tail = use_in_tail(self._channel, survey)

        def start() -> Assembly[S]:
            observers = job.observers
            for observer in observers:
                observer.restart(objectives)
            sink = job.make_sink(job.check)
            assembly = Assembly(self._channel, survey, layout_of, self._limit, sink, observers)
            if in_tail is not None:
                assembly.add_tail(in_tail, objectives)
            return assembly

        assembly = visit(
            self._channel,
            objectives.losses,
            objectives.cotangents(),
            start,
            is_batchable=self._channel.is_batchable,
            retain_graph=retain_graph,
            is_step=job.is_step,
        )
        if not assembly.has_arrivals:
            raise NotConnectedError(
                "The losses do not depend on any parameter of the engine's modules that requires a "
                "gradient. Compute them from an output of these modules, with gradients enabled. A "
                "part that is checkpointed with `use_reentrant=True` hides its parameters: pass "
                "`use_reentrant=False`."
            )
        self._unseen = assembly.unseen
        return assembly.complete()

    def _warn(self, error: AutogramError, objectives: Objectives) -> None:
        """Tells the user, once, that the whole batch is treated as one sample."""
        if "coupled" in self._channel.told:
            return
        self._channel.told.add("coupled")
        sizes = {n for recording in self._channel.recordings for n in recording.sizes}
        if sizes and objectives.samples not in sizes:
            message = (
                f"There are {objectives.samples} losses, and no input of the modules has as many "
                "samples: each loss depends on the whole batch, as those of several tasks do. They "
                "are treated so, which is exact. Say so by `batch_dim=None` to `Engine`."
            )
        else:
            message = (
                f"The objectives are treated as coupled, which is exact and slower. {error} To "
                "treat them so without this warning, also pass `batch_dim=None`."
            )
        warn_user(message, CoupledObjectivesWarning)
