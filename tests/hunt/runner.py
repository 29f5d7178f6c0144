"""Runs scenarios, and counts what came of their steps."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autogram import AutogramError, Engine
from autogram.testing import reference_jacobian
from tests.hunt.pairs import Pair, Passing, tensors_of
from tests.hunt.scenario import Scenario, Step, ways
from tests.unit.checks import irregular

# What a result may be off, relative to the largest entry. Operators that magnify rounding errors
# need more than others; samples in wrong places are off by far more.
TOLERANCE = 1e-7
# Smaller numbers are rounded to few digits, or to zero.
SMALLEST = 1e-300

CALLS = ("gramian", "backward", "turns")
# With one loss or two for each sample, with the samples sought or demanded, and what is called.
CONFIGURATIONS = list(itertools.product((1, 2), ("auto", "0"), CALLS))
PLACES = ("model", "tail", "towers", "twice")


@dataclass
class Failure:
    """A wrong step, and what runs it again."""

    id: str
    step: int
    what: str
    is_by_values: bool
    """Whether nothing changed but the values of floating-point tensors."""


@dataclass
class Tally:
    """What was run, and what came of it."""

    operators: set[str] = field(default_factory=set)
    pairs: set[str] = field(default_factory=set)
    series: int = 0
    steps: int = 0
    exact: int = 0
    unusable: int = 0
    """Series that plain PyTorch does not carry out, or that have no finite gradient."""
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """What plain autograd gives for a step."""

    losses: Tensor
    jacobian: Tensor


def run(pair: Pair, choose: Callable[[int, str], bool], tally: Tally) -> None:
    """Runs the series of a pair, each with a new engine.

    Args:
        pair: The pair.
        choose: Whether to run a series, by its number and its id.
        tally: What to count in.
    """
    number = 0
    for place, samples, passing in ways(pair, PLACES):
        scenarios: dict[int, Prepared | None] = {}
        for per_sample, batch_dim, call in CONFIGURATIONS:
            way = f"{place}-dim{samples}-{passing}/k{per_sample}-{batch_dim}-{call}"
            id_ = f"{pair.id}/{way}"
            number += 1
            if not choose(number - 1, id_):
                continue
            if per_sample not in scenarios:
                scenarios[per_sample] = _prepared(pair, place, samples, passing, per_sample)
            prepared = scenarios[per_sample]
            if prepared is None:
                tally.unusable += 1
                continue
            tally.operators.add(pair.operator)
            tally.pairs.add(pair.id)
            tally.series += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _run_series(id_, prepared, batch_dim, call, tally)


def chooser(place: int, rounds: int, share: int, only: str = "") -> Callable[[int, str], bool]:
    """What to run of a pair: each scenario in some configurations, other ones for other pairs.

    Args:
        place: The number of the pair.
        rounds: In how many configurations.
        share: One of so many scenarios.
        only: What the id must begin with. If it names a scenario, all of that is run.
    """

    def choose(number: int, id_: str) -> bool:
        if "/" in only:
            return id_.startswith(only)
        scenario, configuration = divmod(number, len(CONFIGURATIONS))
        turn = (configuration - 5 * scenario - place) % len(CONFIGURATIONS)
        return turn < rounds and (place + scenario) % share == 0 and id_.startswith(only)

    return choose


Prepared = tuple[Scenario, dict[Step, Expected]]


def _prepared(
    pair: Pair, place: str, samples: int, passing: Passing, per_sample: int
) -> Prepared | None:
    """A scenario with what is right, or nothing if plain PyTorch does not carry it out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scenario = Scenario(pair, place, samples, passing, per_sample)
            before = [x.clone() for x in tensors_of(pair.arguments)]
            expected = {step: _expected(scenario, step) for step in set(scenario.series())}
            if not all(map(torch.equal, before, tensors_of(pair.arguments))):
                return None  # changed in place, as running averages are
            beside = {step: _expected(scenario, step, 1 + 1e-12) for step in expected}
        except Exception:  # whatever PyTorch has against these arguments
            return None
    if not any(found.jacobian.any() for found in expected.values()):
        return None
    # Where rounding errors decide, nothing can be compared. Neither can NaN.
    is_smooth = all(
        _gap(beside[step].jacobian, found.jacobian) < 1e-9
        and _gap(beside[step].losses, found.losses) < 1e-9
        for step, found in expected.items()
    )
    return (scenario, expected) if is_smooth else None


def _expected(scenario: Scenario, step: Step, scale: float = 1.0) -> Expected:
    losses = scenario.losses(step, scale)
    return Expected(losses.detach(), reference_jacobian(losses, scenario.parameters))


def _run_series(id_: str, prepared: Prepared, batch_dim: str, call: str, tally: Tally) -> None:
    scenario, expected = prepared
    dim: Any = "auto" if batch_dim == "auto" else int(batch_dim)
    engine = Engine(*scenario.modules, batch_dim=dim, verify="never")
    is_by_values = scenario.pair.is_by_values
    try:
        for number, step in enumerate(scenario.series()):
            turn = CALLS[number % 2] if call == "turns" else call
            tally.steps += 1
            try:
                error = _error(engine, scenario, step, expected[step], turn)
            except AutogramError as refusal:
                tally.refused[type(refusal).__name__] += 1
            except Exception as bare:
                first = str(bare).strip().splitlines() or [""]
                what = f"{type(bare).__name__}: {first[0][:100]}"
                tally.failures.append(Failure(id_, number, what, is_by_values))
            else:
                if error is None:
                    tally.exact += 1
                else:
                    tally.failures.append(Failure(id_, number, error, is_by_values))
    finally:
        engine.remove()


def _error(
    engine: Engine, scenario: Scenario, step: Step, expected: Expected, call: str
) -> str | None:
    """What is wrong with a step, if anything is."""
    for parameter in scenario.parameters:
        parameter.grad = None
    losses = scenario.losses(step)
    if not _gap(losses.detach(), expected.losses) <= TOLERANCE:
        return "other losses"
    jacobian = expected.jacobian
    if call == "backward":
        weights = irregular(len(jacobian))
        _, gramian = engine.backward(losses, lambda _: weights, return_gramian=True)
        gradient = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                for p in scenario.parameters
            ]
        )
        gap = _gap(gradient, weights @ jacobian)
        if not gap <= TOLERANCE:
            return f"gradient off by {gap:.0e}"
    else:
        gramian = engine.compute_gramian(losses)
    gap = _gap(gramian, jacobian @ jacobian.T)
    return None if gap <= TOLERANCE else f"Gramian off by {gap:.0e}"


def _gap(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    gap, largest = float((actual - expected).abs().max()), float(expected.abs().max())
    return gap / max(largest, SMALLEST) if largest else gap
