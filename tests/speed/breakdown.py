"""Where the time of a step goes: its phases, and the operations inside the Gramian."""

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

from .measure import Trainer

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


def profile_gramian(trainer: Trainer, rows: int = 15) -> str:
    """Table of the operations that take most time in one call of `compute_gramian`."""
    losses = trainer.forward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        trainer.compute_gramian(losses)
    averages = profiler.key_averages(group_by_input_shape=True)
    return str(
        averages.table(
            sort_by="self_cpu_time_total",
            row_limit=rows,
            max_name_column_width=40,
            max_shapes_column_width=60,
        )
    )
