"""Times whole training steps with an engine, compared with SGD."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autogram._check.subject import Subject
from autogram._losses import parts_of

_FEWEST, _MOST, _WARM_UP = 3, 200, 3


@dataclass(frozen=True)
class Times:
    """Medians in milliseconds, over ``count`` steps of each kind."""

    what: str
    """``"steps"``, or ``"backward passes"`` if the losses cannot be recomputed."""
    sgd: float
    fused: float | None
    """With ``engine.backward``, or ``None`` if the losses cannot be recomputed."""
    two_passes: float
    count: int


def mean_weights(gramian: Tensor) -> Tensor:
    """Weights that cost nothing, and give the same step as SGD."""
    return gramian.new_full((len(gramian),), 1 / len(gramian))


def time_steps(subject: Subject, seconds: float, tell: Callable[[float], None]) -> Times:
    """Times the kinds of steps in turns, so that all are measured under the same load.

    Makes at least a few turns. ``tell`` receives the share of the time that has passed.
    """
    parameters = [p for module in subject.modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    steps: dict[str, Callable[[], object]] = {
        "sgd": lambda: _plain(subject),
        "fused": lambda: subject.engine.backward(subject.losses(), mean_weights),
        "two_passes": lambda: _two_passes(subject),
    }
    if not subject.is_repeatable:
        del steps["fused"]  # the graph is needed again
    times: dict[str, list[float]] = {name: [] for name in steps}
    device = parts_of(subject.losses())[0].device
    start = time.perf_counter()
    while len(times["sgd"]) < _MOST:
        passed = time.perf_counter() - start
        if passed > seconds and len(times["sgd"]) >= _FEWEST + _WARM_UP:
            break
        tell(min(1.0, max(passed / seconds, len(times["sgd"]) / _MOST)))
        for name, step in steps.items():
            _wait_for(device)
            before = time.perf_counter()
            optimizer.zero_grad()
            step()
            if subject.is_repeatable:
                optimizer.step()  # changes parameters in place, as their graph would notice
            _wait_for(device)
            times[name].append(1e3 * (time.perf_counter() - before))
    optimizer.zero_grad()
    middle = {name: median(found[_WARM_UP:]) for name, found in times.items()}
    return Times(
        "steps" if subject.is_repeatable else "backward passes",
        middle["sgd"],
        middle.get("fused"),
        middle["two_passes"],
        len(times["sgd"]) - _WARM_UP,
    )


def _plain(subject: Subject) -> None:
    """A step without the engine."""
    with subject.engine.paused():
        losses = parts_of(subject.losses())
        weights = [torch.full_like(x, 1 / sum(y.numel() for y in losses)) for x in losses]
        torch.autograd.backward(losses, weights, retain_graph=not subject.is_repeatable)


def _two_passes(subject: Subject) -> None:
    """The Gramian, and a backward pass of the weighted losses."""
    losses: Any = subject.losses()
    weights = parts_of(subject.engine.weights(losses, mean_weights))
    torch.autograd.backward(parts_of(losses), weights, retain_graph=not subject.is_repeatable)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
