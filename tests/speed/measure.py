"""How it is measured: times in interleaved rounds, and the errors of the Gramians."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import median, quantiles

import torch
from torch import Tensor

from autogram.testing import reference_jacobian

from .training import EngineFactory, FusedEngine, constant_weights
from .workloads import Workload

VISIT_SECONDS = 0.15  # shortest time of a visit: well above the jitter of the clock and scheduler

Visit = Callable[[int], float]
"""Takes some steps, and returns the mean seconds of one."""


@dataclass
class Timing:
    """Seconds of a step of one trainer, one entry per round, by the order of the trainers."""

    forwards: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)

    def extend(self, other: "Timing") -> None:
        """Add the entries of later rounds."""
        self.forwards += other.forwards
        self.backwards += other.backwards

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


def count_repeats(visit: Visit) -> int:
    """How many steps a visit should take."""
    return ceil(VISIT_SECONDS / min(visit(1) for _ in range(3)))


def time_steps(
    visits: Mapping[str, Visit], repeats: Mapping[str, int], rounds: int
) -> dict[str, Timing]:
    """Visit trainers in turns, in every round once in the given order and once in reverse."""
    timings = {name: Timing() for name in visits}
    for _ in range(rounds):
        for name, visit in visits.items():
            timings[name].forwards.append(visit(repeats[name]))
        for name, visit in reversed(visits.items()):
            timings[name].backwards.append(visit(repeats[name]))
    return timings


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
    parameters = [p for p in model.parameters() if p.requires_grad]
    jacobian = reference_jacobian(losses, parameters)

    engine = make_engine(model)
    gramian = engine.compute_gramian(workload.compute_losses(model(inputs), targets))
    # Summed by pairs: a matrix product of few long rows has larger errors than the Gramian.
    expected = torch.stack([(jacobian * row).sum(1) for row in jacobian])
    errors = [relative_error(gramian, expected)]
    if isinstance(engine, FusedEngine):
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        errors.append(relative_error(gradient, constant_weights(gramian) @ jacobian))
    return max(errors)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest entry."""
    return float((actual - expected).abs().max() / expected.abs().max())
