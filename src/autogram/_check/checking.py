"""The check: report, verification, parameters with explicit rows, and advice."""

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
"""A function that receives the running phase, and the finished share of it."""


@dataclass(frozen=True)
class Fallback:
    """A parameter that needs explicit rows of J."""

    parameter: str
    functions: tuple[str, ...]
    """The calls without a rule that read the parameter."""
    elements: int
    """The number of elements of the rows."""
    advice: str


@dataclass
class Found:
    """The findings of a check."""

    status: Verdict = "fine"
    """``"one objective"``: the result is right, but there is nothing to weigh. ``"wrong"``: a
    result differs from an ordinary backward pass. ``"unsupported"``: the engine raised another
    error."""
    error: str | None = None
    kind: str | None = None
    """The class of this error."""
    warnings: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """The shapes of the losses."""
    device: str = ""
    report: Report | None = None
    fallbacks: list[Fallback] = field(default_factory=list)
    times: Times | None = None

    def to_dict(self) -> dict[str, Any]:
        """The findings in dicts, lists, numbers and strings, for JSON."""
        found = {**asdict(self), "report": None, "torch": torch.__version__}
        if self.report is not None:
            found["report"] = self.report.to_dict()
        return found


def check(place: str, batch_dim: BatchDim, seconds: float, tell: Tell) -> Found:
    """Checks the model and the losses that a user's function returns.

    Args:
        place: The function, as ``module:function``.
        batch_dim: As for the engine.
        seconds: How long to time steps; 0 skips timing.
        tell: Receives the progress.
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
    """Report and two verifications: the first examines the graph, the second remembers it."""
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
                "Use it in the `forward` of a module that is passed to the engine: no recorded "
                "call reads it."
            )
        else:
            advice = (
                "If that is slow, write it with calls that have a rule "
                "(`autogram.rules.registered_functions()` lists them), or register one with "
                "`autogram.rules.register_rule`."
            )
        elements = report.samples * report.per_sample * prod(parameter.shape)
        found.append(Fallback(parameter.name, functions, elements, advice))
    return found
