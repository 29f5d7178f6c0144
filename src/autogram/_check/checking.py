"""The check: report, verification, parameters that cost explicit rows, and advice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

import torch

from autogram._capture.backward.driver import BatchDim
from autogram._check.subject import Subject, find_function, is_of_passes, users_code
from autogram._check.timing import Times, time_steps
from autogram._losses import parts_of
from autogram._report import Report
from autogram.errors import AutogramError, VerificationError

Verdict = Literal["fine", "one objective", "wrong", "unsupported"]
Tell = Callable[[str, float], None]
"""A function that is called with the phase that runs, and the share of it that is done."""


@dataclass(frozen=True)
class Fallback:
    """A parameter that costs explicit rows of J."""

    parameter: str
    functions: tuple[str, ...]
    """The calls without a rule that read the parameter."""
    elements: int
    """How many numbers the rows have."""
    advice: str


@dataclass
class Found:
    """The findings of a check."""

    status: Verdict = "fine"
    """``"one objective"``: the result is right, and there is nothing to weigh. ``"wrong"``: a
    result is not that of an ordinary backward pass. ``"unsupported"``: the engine raised another
    error."""
    error: str | None = None
    kind: str | None = None
    """The class of this error."""
    warnings: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Those of the losses."""
    device: str = ""
    report: Report | None = None
    fallbacks: list[Fallback] = field(default_factory=list)
    times: Times | None = None

    def to_dict(self) -> dict[str, Any]:
        """The findings as dicts, lists, numbers and strings, for JSON."""
        found = {**asdict(self), "report": None, "torch": torch.__version__}
        if self.report is not None:
            found["report"] = self.report.to_dict()
        return found


def check(place: str, batch_dim: BatchDim, seconds: float, tell: Tell) -> Found:
    """Checks the model and the losses that a user's function returns.

    Args:
        place: Where the function is, as ``module:function``.
        batch_dim: As for the engine.
        seconds: How long to time steps. For 0, no step is timed.
        tell: Is called with the progress.
    """
    tell("loading", 0)
    function = find_function(place)
    found = Found()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tell("computing losses", 0)
            subject = Subject(function, batch_dim)
            with subject.engine, users_code(is_of_passes):
                _check(subject, found, tell)
                if seconds:
                    found.times = time_steps(subject, seconds, lambda share: tell("timing", share))
        except AutogramError as error:
            found.status = "wrong" if isinstance(error, VerificationError) else "unsupported"
            found.error, found.kind = str(error), type(error).__name__
    for warning in caught:
        if warning.category.__module__.startswith("autogram"):
            found.warnings.append(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return found


def _check(subject: Subject, found: Found, tell: Tell) -> None:
    """Report and two verifications: the first looks at the graph, the second knows it."""
    for i in range(2):
        tell("verifying", i / 2)
        losses = subject.losses()
        parts = parts_of(losses)
        found.shapes, found.device = [tuple(x.shape) for x in parts], str(parts[0].device)
        subject.engine.verify(losses)
        if sum(part.numel() for part in parts) == 1:
            found.status = "one objective"
        if i == 0:
            found.report = subject.engine.report()
            found.fallbacks = _fallbacks(found.report)


def _fallbacks(report: Report) -> list[Fallback]:
    """Parameters whose rows come from the fallback, with advice for each."""
    found = []
    for parameter in report.parameters:
        functions = tuple(dict.fromkeys(x.function for x in parameter.uses if x.rule is None))
        if not functions:
            continue
        if functions == ("the losses",):
            advice = (
                "No recorded call reads it. Use it in the `forward` of a module that is given to "
                "the engine."
            )
        else:
            advice = (
                "If that is slow, write it by calls that have a rule "
                "(`autogram.rules.registered_functions()` lists them), or register one by "
                "`autogram.rules.register_rule`."
            )
        elements = report.samples * report.per_sample * prod(parameter.shape)
        found.append(Fallback(parameter.name, functions, elements, advice))
    return found
