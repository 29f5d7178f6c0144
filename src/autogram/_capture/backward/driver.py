"""The driver: makes the passes of an engine's calls, and remembers layouts between calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from autogram._blocks import Devices, Keep
from autogram._capture.autograd.exact import exact
from autogram._capture.autograd.graph import explaining_freed_graphs
from autogram._capture.backward.assembly import assemble
from autogram._capture.backward.diagnosis import confirm, tell_of_coupling
from autogram._capture.backward.rows import are_rows_cheaper, assemble_rows, few_others
from autogram._capture.backward.run import Run, Summary
from autogram._capture.backward.unseen import Unseen, tell_of_compiled, tell_of_unseen
from autogram._capture.backward.verification import Check, Schedule, Verify
from autogram._capture.from_graph.ends import ends_at_parameters
from autogram._capture.limit import is_out_of_memory, retried
from autogram._capture.recording import Channel
from autogram._capture.samples.call import CallLayouts, Remembered
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.replays import Replays, is_captured
from autogram._capture.samples.survey import Survey
from autogram._capture.samples.tail import showing
from autogram._containers import Latest
from autogram._undo import undone
from autogram.errors import (
    MixedSamplesError,
    NonFiniteError,
    UnsupportedError,
    UnverifiedWarning,
    VerificationError,
    warn_user,
)

BatchDim = int | Literal["auto"] | None

# Summaries are kept for so many graphs, for instance of different batch sizes.
_MOST_SUMMARIES = 16

# Whether the caller looks for non-finite gradients, as a gradient scaler does.
_IS_OVERFLOW_EXPECTED = ContextVar("_IS_OVERFLOW_EXPECTED", default=False)


@contextmanager
def expecting_overflow(is_expected: bool) -> Iterator[None]:
    """Sets whether calls in a block, in this thread, may overflow without an error or a warning."""
    with undone(partial(_IS_OVERFLOW_EXPECTED.set, _IS_OVERFLOW_EXPECTED.get())):
        _IS_OVERFLOW_EXPECTED.set(is_expected)
        yield


class Driver:
    """Runs backward passes for one engine, and remembers the layouts that it found.

    Calls that are captured into CUDA graphs leave their comparisons in the ``replays``.
    """

    def __init__(
        self,
        channel: Channel,
        batch_dim: BatchDim,
        devices: Devices,
        verify: Verify,
        unseen: Unseen,
        replays: Replays,
    ) -> None:
        self._channel = channel
        self._batch_dim = batch_dim
        self.limit = devices.limit  # shared by the engine and its Jacobians
        self._devices = devices
        self._on_unseen: Unseen = unseen
        self._replays = replays
        self._is_repeatable = False
        self._refused = Latest[bytes, None]()  # structures of graphs with mixed samples
        self._is_short_of_memory = False  # whether all rows together were once too large
        self._remembered = Remembered(devices.limit)
        self._schedule = Schedule(verify)
        self.summary = Summary(self.limit)  # of the last call
        self._summaries = Latest[Hashable, Summary](_MOST_SUMMARIES)  # by graph and parameters

    def run(self, losses: Tensor, **asked: Any) -> Run:
        """Makes one call. ``asked`` are fields of the run, which also holds the results."""
        with exact(losses.device):
            if not losses.numel():
                return self._without_pass(losses)
            run = self._begin(losses, **asked)
            # A check needs the graph again, and so do leaves outside of J.
            needs_graph = run.check is not None or bool(run.survey.tail)
            if not (run.retain_graph or needs_graph):
                needs_graph = bool(run.survey.outside) and not run.others
            run.retain_graph = run.retain_graph or needs_graph
            self._make_passes(run)
            return run

    @property
    def is_settled(self) -> bool:
        """Whether a call like the last one looks at no graph, and some result was confirmed."""
        return self._is_repeatable and self._schedule.is_confirmed

    def _without_pass(self, losses: Tensor) -> Run:
        """A call for losses without elements: a Jacobian without rows."""
        survey, objectives = Survey(self._channel, losses), Objectives(losses, None)
        run = Run(self._channel, self._devices, survey, objectives, check=None)
        dtype = torch.promote_types(losses.dtype, torch.float32)
        run.gramian = losses.new_zeros(0, 0, dtype=dtype)
        return run

    def _begin(
        self, losses: Tensor, *, must_verify: bool = False, has_others: bool = False, **asked: Any
    ) -> Run:
        """Begins a call: its survey, its objectives, and its check if one is due."""
        batch_dim = 0 if self._batch_dim == "auto" else self._batch_dim
        if not losses.dim():
            batch_dim = None
        may_be_rows = batch_dim is None or asked.get("are_single", False)
        with explaining_freed_graphs(losses):
            survey = Survey(self._channel, losses, is_bare=may_be_rows and self._takes_rows)
            if survey.is_bare and not self._are_rows_cheaper(survey, asked.get("form")):
                survey = Survey(self._channel, losses)
        batch_dim = None if survey.is_bare else batch_dim
        replays = self._replays if is_captured(losses.device) else None
        check = None
        if replays is not None:
            replays.check_prepared()
            if must_verify:
                raise UnsupportedError(
                    "A step that is captured into a CUDA graph cannot be verified, because a check "
                    "reads values from the device. Call `engine.verify` outside the capture."
                )
        else:
            check = self._schedule.next(survey, must=must_verify)
        if (listener := self._channel.listener) is not None:
            listener.begin(survey.key, losses.device)
            asked.setdefault("sinks", [listener])
        objectives, layouts = Objectives(losses, batch_dim), None
        if objectives.samples != 1:
            layouts = CallLayouts(self._remembered, objectives, survey, replays)
        return Run(
            self._channel,
            self._devices,
            survey,
            objectives,
            check,
            layouts,
            others=few_others(survey, self._devices) if survey.is_bare and has_others else [],
            summary=None if survey.key_of_report in self._summaries else Summary(self.limit),
            must_verify=must_verify,
            **asked,
        )

    def _make_passes(self, run: Run) -> None:
        """Makes the passes of a run, verifies its result if a check is due, and keeps a summary."""
        self._is_repeatable = True
        if run.check is not None:
            run.check.begin()
        if run.layouts is None or not self._collect_per_sample(run, run.layouts):
            run.objectives, run.layouts = Objectives(run.survey.losses, None), None
            self._assemble_one_sample(run)
            if run.check is not None:
                self._confirm(run, run.check)
        key = run.survey.key_of_report
        self.summary = run.summary or self._summaries[key]
        if run.summary is not None:
            self._summaries[key] = self.summary
            for recording in run.survey.passes or self._channel.recordings:
                for parameter, name in recording.names.items():
                    self.summary.names.setdefault(name, parameter.requires_grad)
            for name in run.survey.left_out.values():
                self.summary.names[name] = None
            tell_of_compiled(self._channel, run.survey, self._on_unseen)
        if run.unseen:
            tell_of_unseen(self._channel, run.unseen, run.survey, self._on_unseen)

    def _assemble_one_sample(self, run: Run) -> None:
        """Makes the passes of a run whose batch is one sample."""
        if self._channel.reads_graph and not run.survey.is_bare:
            run.survey.read_at(ends_at_parameters(run.survey.graph))
        if not (run.survey.is_bare or self._are_rows_cheaper(run.survey, run.form, run.is_misled)):
            with showing(run.survey.tail):
                assemble(run)
            return
        try:
            assemble_rows(run)
        except RuntimeError as error:
            self._is_short_of_memory |= is_out_of_memory(error)
            raise

    @property
    def _takes_rows(self) -> bool:
        """Whether to allow passes for single objectives, which report no unseen uses."""
        return self._on_unseen != "error" and not self._is_short_of_memory

    def _are_rows_cheaper(self, survey: Survey, form: Keep | None, is_misled: bool = False) -> bool:
        """Whether to make a pass for each objective of a batch that is one sample."""
        summary = None if survey.is_bare else self._summaries.get(survey.key_of_report)
        is_cheaper = partial(are_rows_cheaper, survey, self._devices, form, summary)
        return self._takes_rows and is_cheaper(is_misled=is_misled)

    def _collect_per_sample(self, run: Run, layouts: CallLayouts) -> bool:
        """Makes the passes, and returns whether the losses turned out to be per-sample."""
        try:
            self._make_certain(run, layouts)
        except (MixedSamplesError, VerificationError) as error:
            is_certain = isinstance(error, MixedSamplesError) or (
                error.is_of_samples and not error.is_late
            )
            if is_certain and self._takes_back(run):
                run.is_misled = True  # the next forward pass will show more
                return False
            if self._batch_dim != "auto" or not is_certain:
                raise
            layouts.refuse(str(error))
            tell_of_coupling(self._channel, run.objectives.samples, error)
            return False
        learn, recordings = self._channel.counting.learn, run.survey.recordings
        is_another = learn(recordings, run.objectives.samples, are_apart=True)
        self._is_repeatable = not is_another
        return True

    def _takes_back(self, run: Run) -> bool:
        """Withdraws guesses about the samples, and returns whether the next graph will differ.

        Guesses that the graph does not reach count, too: calls may have read a detached copy.
        """
        learn, recordings = self._channel.counting.learn, run.survey.recordings
        guesses: set[str] = set().union(*[of.guesses for of in recordings])
        self._channel.unspread.update(guesses)
        has_learnt = learn(recordings, run.objectives.samples, are_apart=False)
        is_guess = any(of.is_guess for of in recordings)
        # Each graph counts once. If constants do not help either, inputs are guesses again.
        if run.survey.structure not in self._refused and (is_guess or not (has_learnt or guesses)):
            self._refused[run.survey.structure] = None
            self._channel.guesses_inputs = not is_guess
        else:
            is_guess = False
        self._is_repeatable = not (guesses or is_guess or has_learnt)
        return bool(guesses) or is_guess or (has_learnt and self._batch_dim == "auto")

    def _make_certain(self, run: Run, layouts: CallLayouts) -> None:
        """Makes a pass with the right layouts, and verifies it.

        A GPU compares the deciding values during the pass. If they have changed, the pass is made
        again.
        """
        with showing(run.survey.tail) if run.survey.tail else nullcontext():
            layouts.begin()
            assemble(run)
            if not layouts.holds():
                layouts.look_again()
                assemble(run)
        if run.check is None:
            return
        try:
            self._confirm(run, run.check)
        except VerificationError as error:
            if error.is_of_samples:
                layouts.refuse(str(error))
            if not layouts.is_remembered:
                raise
            doubted = self._schedule.confirmed + 1, self._schedule.calls
            raise error.since(doubted) from None

    def _confirm(self, run: Run, check: Check) -> None:
        """Raises if the check of a run shows that its result is wrong."""
        is_confirmed = True
        try:
            confirm(run, check)
        except NonFiniteError as error:
            if run.must_verify:
                raise
            if not _IS_OVERFLOW_EXPECTED.get():
                warn_user(str(error), UnverifiedWarning)
            is_confirmed = False
        self._schedule.note_checked(run.survey, is_confirmed=is_confirmed)


class Drivers:
    """The drivers of an engine. Each serves one call at a time.

    Successive calls share one driver, whichever thread makes them. Simultaneous calls, in several
    threads or inside one another, have different drivers, which share nothing that they
    remember.
    """

    def __init__(self, make: Callable[[], Driver]) -> None:
        self._make = make
        self.last = make()  # driver of the last call that has ended
        self._idle = [self.last]

    def run(self, losses: Tensor, **asked: Any) -> Run:
        """Makes one call with a driver that is free; see :meth:`Driver.run`."""
        try:
            driver = self._idle.pop()
        except IndexError:
            driver = self._make()
        with undone(partial(self._release, driver)):
            return retried(driver.limit, driver.run, losses, **asked)

    def _release(self, driver: Driver) -> None:
        """Frees a driver for other calls."""
        self.last = driver
        if driver not in self._idle:
            self._idle.append(driver)
