"""How it is measured: steps, their times in interleaved rounds, and the errors of the Gramians."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from statistics import median, quantiles
from typing import Protocol

import torch
from torch import Tensor

from autogram import Engine
from autogram.testing import reference_jacobian

from .workloads import Workload

BASELINE = "SGD"
VISIT_SECONDS = 0.15  # shortest time of a visit: well above the jitter of the clock and scheduler


class GramianEngine(Protocol):
    """What the engines of autogram and of torchjd have in common."""

    def compute_gramian(self, output: Tensor, /) -> Tensor:
        """Gramian of the Jacobian of the output."""


class FusedEngine:
    """autogram's engine, whose fused step is measured.

    Args:
        model: The model to train.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._engine = Engine(model)

    def compute_gramian(self, output: Tensor, /) -> Tensor:
        """Gramian of the Jacobian of the output, and gradients with constant weights."""
        return self._engine.backward(output, _constant_weights, return_gramian=True)[1]


EngineFactory = Callable[[torch.nn.Module], GramianEngine]
Step = Callable[[], None]


class Trainer:
    """A model on one batch, trained by gradient descent, or by Jacobian descent with an engine.

    Every trainer has a model of its own, as engines leave hooks on theirs.
    """

    def __init__(self, workload: Workload, make_engine: EngineFactory | None = None) -> None:
        torch.manual_seed(0)
        self._workload = workload
        self._model = workload.make_model()
        self._inputs, self._targets = workload.make_batch(workload.batch_size)
        # A small rate: the weights should move, as they do in training, but not diverge.
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        self._engine = make_engine(self._model) if make_engine else None

    def step(self) -> None:
        """Train for one step."""
        losses = self.forward()
        self.compute_gramian(losses)
        self.backward(losses)
        self.update()

    def forward(self) -> Tensor:
        """Losses of the samples, shape ``(B,)``."""
        return self._workload.compute_losses(self._model(self._inputs), self._targets)

    def compute_gramian(self, losses: Tensor) -> None:
        """Compute the Gramian, if there is an engine for it."""
        if self._engine is not None:
            self._engine.compute_gramian(losses)

    def backward(self, losses: Tensor) -> None:
        """Accumulate the gradient: of the mean, or of the sum with constant weights."""
        if self._engine is None:
            losses.mean().backward()
        elif not isinstance(self._engine, FusedEngine):  # which has done so
            losses.backward(torch.full_like(losses, 1 / losses.numel()))

    def update(self) -> None:
        """Move the parameters along the gradient."""
        self._optimizer.step()
        self._optimizer.zero_grad()


@dataclass
class Timing:
    """Seconds of a step of one trainer, one entry per round, by the order of the trainers."""

    forwards: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """All entries."""
        return self.forwards + self.backwards

    def over(self, baseline: "Timing") -> "Ratio":
        """Ratios to the baseline's time in the same round and order, where drift cancels."""
        orders = (
            [mine / its for mine, its in zip(self.forwards, baseline.forwards, strict=True)],
            [mine / its for mine, its in zip(self.backwards, baseline.backwards, strict=True)],
        )
        low, middle, high = quantiles(orders[0] + orders[1], n=4, method="inclusive")
        return Ratio(middle, low, high, tuple(median(order) for order in orders))


@dataclass(frozen=True)
class Ratio:
    """Median, quartiles, and the medians of the two orders of run alone."""

    median: float
    low: float
    high: float
    by_order: tuple[float, ...]


def time_steps(steps: dict[str, Step], rounds: int) -> dict[str, Timing]:
    """Time the steps in turns, in every round once in the given order and once in reverse."""
    for step in steps.values():
        for _ in range(3):  # planning, verification on the first calls, lazy initialisations
            step()
    repeats = {name: _count_repeats(step) for name, step in steps.items()}
    timings = {name: Timing() for name in steps}
    for _ in range(rounds):
        for name in steps:
            timings[name].forwards.append(_visit(steps[name], repeats[name]))
        for name in reversed(steps):
            timings[name].backwards.append(_visit(steps[name], repeats[name]))
    return timings


def _count_repeats(step: Step) -> int:
    return ceil(VISIT_SECONDS / min(_time(step, 1) for _ in range(3)))


def _visit(step: Step, repeats: int) -> float:
    step()  # brings the trainer's weights and buffers back into the caches
    return _time(step, repeats)


def _time(step: Step, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def gramian_error(workload: Workload, make_engine: EngineFactory) -> float:
    """Error of an entry of the Gramian in float64, relative to the largest entry.

    It is computed on a small batch, against the Jacobian by plain autograd, loss by loss. For the
    fused step, errors of the gradient count too.
    """
    torch.manual_seed(0)
    model = workload.make_model().double()
    inputs, targets = workload.make_batch(workload.check_size)
    inputs = inputs.double() if inputs.is_floating_point() else inputs

    losses = workload.compute_losses(model(inputs), targets)  # before there is an engine
    parameters = list(model.parameters())
    jacobian = reference_jacobian(losses, parameters)

    engine = make_engine(model)
    gramian = engine.compute_gramian(workload.compute_losses(model(inputs), targets))
    errors = [_relative_error(gramian, jacobian @ jacobian.T)]
    if isinstance(engine, FusedEngine):
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        errors.append(_relative_error(gradient, _constant_weights(gramian) @ jacobian))
    return max(errors)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _constant_weights(gramian: Tensor) -> Tensor:
    return gramian.new_full((len(gramian),), 1 / len(gramian))
