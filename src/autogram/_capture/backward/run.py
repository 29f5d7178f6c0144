"""A run: one call of an engine, what it is asked for and what it has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from string import ascii_uppercase
from typing import Protocol

import torch
from torch import Tensor

from autogram._blocks import Arena, Block, Columns, Devices, Keep, Region
from autogram._capture.backward.summary import Summary
from autogram._capture.backward.verification import Check, leaves_outside
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.replays import Replays
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use


class Sink(Protocol):
    """Takes the columns of parameters one after the other, as soon as they are complete."""

    def restart(self, objectives: Objectives) -> None:
        """Begins a pass, and forgets what was taken in another."""

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Takes all columns of a parameter, which come once in a pass."""


@dataclass(eq=False)
class Run:
    """One call of an engine, which makes as many passes as it needs. Lives as long as the call."""

    channel: Channel
    devices: Devices
    survey: Survey
    objectives: Objectives
    check: Check | None
    """The verification of this call, if one is due."""
    replays: Replays | None = None
    """Where comparisons are left, if the call is captured into a CUDA graph."""
    form: Keep | None = None
    """Whether to keep factors or rows, or ``None`` to keep nothing."""
    arena: Arena | None = None
    """Where to put kept rows."""
    is_summed: bool = True
    """Whether to add up the Gramian."""
    sinks: Sequence[Sink] = ()
    """What takes the columns of each parameter."""
    summary: Summary | None = None
    """The summary to which each block is added; ``None`` if an earlier call has a summary of this
    graph."""
    must_verify: bool = False
    """Whether to raise an error if gradients that are not finite prevent the verification."""
    retain_graph: bool = True
    """Whether the graph is needed after the pass."""
    is_step: bool = False
    """Whether the pass stands for the user's own backward pass."""
    is_misled: bool = False
    """Whether the batch is one sample because of a wrong guess, which later calls do not make."""
    has_searched: bool = False
    """Whether this call searched for the samples. If not, their layouts were remembered."""
    unseen: list[Use] = field(default_factory=list)
    """Uses that the recorder did not see, and the graph has shown."""
    columns: dict[Tensor, Columns] = field(default_factory=dict)
    """The columns of each parameter that the losses reach, if they are kept."""
    gramian: Tensor = field(default_factory=lambda: torch.empty(0, 0, device="cpu"))
    """``(m, m)``, in the row-major order of the losses; empty if it is not added up."""

    @cached_property
    def outside(self) -> list[Tensor]:
        """The leaves behind the losses that are no part of J."""
        return leaves_outside(self.survey)

    @cached_property
    def inside(self) -> list[Tensor]:
        """The leaves behind the losses that are part of J."""
        outside = set(self.outside)
        return [leaf for leaf in self.survey.leaves if leaf not in outside]

    @property
    def names(self) -> dict[Tensor, str]:
        """The parameters that have columns, and all others that could have, with their names."""
        return self.channel.names(self.columns, self.survey.passes, self.survey.left_out)


def fill_with_nan(run: Run) -> None:
    """Gives a run results that are not a number, for each objective and whatever the losses reach.

    These stand for what was not found because of an overflow, so that gradients and, with several
    ranks, Gramians of all ranks are not a number either.
    """
    survey = run.survey
    run.objectives = Objectives(survey.losses, None)
    m = survey.losses.numel()
    run.columns = {parameter: _columns(parameter, m, run.devices) for parameter in run.inside}
    for sink in run.sinks:  # what it has taken is not what there is
        sink.restart(run.objectives)
    if run.is_summed:
        dtype = torch.promote_types(survey.losses.dtype, torch.float32)
        run.gramian = survey.losses.new_full((m, m), torch.nan, dtype=dtype)


def _columns(parameter: Tensor, m: int, devices: Devices) -> Columns:
    """Rows of a parameter for m objectives, each of whose elements is not a number.

    They are the product of two factors, one of which repeats one element.
    """
    dtype, device = parameter.dtype.to_real(), parameter.device
    columns = Columns(Region.of_parameter(parameter), devices.on(device))
    shape = columns.parameter.shape
    nans = torch.full((m, 1, 1), torch.nan, dtype=dtype, device=device)  # (k, b, t)
    ones = torch.ones((), dtype=dtype, device=device).expand(1, *shape)
    dims = ascii_uppercase[: len(shape)]
    columns.add(columns.parameter, Block(f"kbt,t{dims}->kb{dims}", (nans, ones)))
    return columns
