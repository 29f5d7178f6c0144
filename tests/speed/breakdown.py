"""Where the time of a step goes: its phases, and the operations inside the Gramian."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

from .training import Trainer

PHASES = ("forward", "gramian", "backward", "update")

T = TypeVar("T")


def time_phases(trainer: Trainer, steps: int) -> dict[str, float]:
    """Median seconds of each phase of a step."""
    laps: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def lap(phase: str, function: Callable[..., T], *args: object) -> T:
        start = time.perf_counter()
        result = function(*args)
        laps[phase].append(time.perf_counter() - start)
        return result

    for _ in range(steps):
        losses = lap("forward", trainer.forward)
        lap("gramian", trainer.compute_gramian, losses)
        lap("backward", trainer.backward, losses)
        lap("update", trainer.update)
    return {phase: median(seconds) for phase, seconds in laps.items()}


@dataclass(frozen=True)
class Operation:
    """A torch operation on operands of certain shapes, in one call of `compute_gramian`.

    Attributes:
        name: What the profiler calls it.
        shapes: Shapes of its operands, as text.
        calls: How often it ran.
        seconds: Time of all its runs together, without the operations that it called itself.
    """

    name: str
    shapes: str
    calls: int
    seconds: float

    def __str__(self) -> str:
        milliseconds = f"{1000 * self.seconds:8.2f} ms"
        return f"{milliseconds} {self.calls:4} x  {self.name[:40]:40}  {self.shapes[:100]}"


def profile_gramian(trainer: Trainer, calls: int = 5) -> list[Operation]:
    """The operations inside `compute_gramian`, the slowest first.

    Times are the shortest of several calls: what else runs on the machine only ever adds. What is
    not in each of them belongs to a call that is verified, or that looks at a new graph.
    """
    fastest: dict[tuple[str, str], Operation] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for _ in range(calls):
        losses = trainer.forward()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            trainer.compute_gramian(losses)
        for event in profiler.key_averages(group_by_input_shape=True):
            key = (event.key, str(event.input_shapes))
            found = Operation(*key, event.count, event.self_cpu_time_total / 1e6)
            known = fastest.get(key, found)
            fastest[key] = min(found, known, key=lambda operation: operation.seconds)
            seen[key] += 1
    always = [operation for key, operation in fastest.items() if seen[key] == calls]
    return sorted(always, key=lambda operation: -operation.seconds)
