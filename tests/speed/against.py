"""The present package against another one: `python -m tests.speed --against SRC`.

SRC is the folder `src` of another version of autogram, for instance of a worktree of git. Each step
of each model, by two passes and fused, is trained with both packages, each in a process of its own
that imports one of them. The processes are visited in turns, in every round once in one order and
once in the other, and start anew several times, so that drift of the machine concerns both. Models
and steps are those of the present tests, which call the public interface alone. The environment is
passed on, for instance variables that tell the C library to keep memory.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from .measure import Ratio
from .process import TrainingProcess, time_launches
from .report import as_table, with_quartiles
from .workloads import WORKLOADS

STEPS = {"autogram": "two passes", "fused": "fused"}
"""What is measured, by the name of the engine."""


@dataclass(frozen=True)
class Pair:
    """Times of one step of one workload with two packages.

    Attributes:
        description: The workload in words.
        step: Which step.
        seconds: Median time with the other package.
        ratio: Time with the present package over that with the other one.
    """

    description: str
    step: str
    seconds: float
    ratio: Ratio


def compare_trees(
    model: str, other: Path, launches: int | None, rounds: int, threads: int | None = None
) -> list[Pair]:
    """Time the steps of one workload with the present package and with the one in a folder."""
    workload = WORKLOADS[model]
    found = []
    for engine, step in STEPS.items():
        print(f"Measuring: {workload.description}, {step}", file=sys.stderr)
        start = partial(TrainingProcess, model, engine, threads)
        starts = {"present": start, "other": partial(start, source=other)}
        timings, failures = time_launches(starts, launches or workload.launches, rounds)
        if failures:
            raise RuntimeError(f"One of the packages does not run: {failures}")
        ratio = timings["present"].over(timings["other"])
        found.append(Pair(workload.description, step, median(timings["other"].seconds), ratio))
    return found


def make_table_of_trees(pairs: Sequence[Pair]) -> str:
    """Markdown table, with one line per step and workload, and how to read it."""
    rows = [["model", "step", "other", "present / other"], ["---", "---", "---:", "---:"]]
    for pair in pairs:
        milliseconds = f"{1000 * pair.seconds:.1f} ms"
        rows.append([pair.description, pair.step, milliseconds, with_quartiles(pair.ratio)])
    return (
        f"{as_table(rows)}\n\nTime of a whole step with the present package over that with the "
        "other one: median (quartiles). Above 1, the present one is slower."
    )
