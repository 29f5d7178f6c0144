"""Overflows that a gradient scaler expects: results that are not a number, and no errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from string import ascii_uppercase

import torch
from torch import Tensor

from autogram._blocks import Block, Columns, Devices, Region
from autogram._capture.backward.run import Run
from autogram._capture.samples.objectives import Objectives

_IS_EXPECTED = ContextVar("_IS_EXPECTED", default=False)


def is_overflow_expected() -> bool:
    """Whether the caller looks for gradients that are not finite, and deals with them."""
    return _IS_EXPECTED.get()


@contextmanager
def expecting_overflow(is_expected: bool) -> Iterator[None]:
    """Says whether calls in a block, in this thread, may overflow without an error or a warning."""
    token = _IS_EXPECTED.set(is_expected)
    try:
        yield
    finally:
        _IS_EXPECTED.reset(token)


def fill_with_nan(run: Run) -> None:
    """Gives a run results that are not a number, for each objective and whatever the losses reach.

    These stand for what was not found because of an overflow, so that gradients and, with several
    ranks, Gramians of all ranks are not a number either.
    """
    survey = run.survey
    run.objectives = Objectives(survey.losses, None)
    m = survey.losses.numel()
    run.columns = {parameter: _columns(parameter, m, run.devices) for parameter in run.inside}
    if run.channel.listener is not None:  # what it has taken is not what there is
        run.channel.listener.restart(run.objectives)
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
