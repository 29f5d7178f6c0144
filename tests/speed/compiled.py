"""Compiled models: steps over compiled SGD, the time of the first step, and memory.

Run as ``python -m tests.speed --compiled``.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from .process import TrainingProcess, time_launches
from .report import as_table, with_quartiles
from .training import BASELINE, COMPILED, make_trainer
from .workloads import WORKLOADS

TRAINERS = [COMPILED + BASELINE, COMPILED + "autogram", COMPILED + "fused", BASELINE, "fused"]


@dataclass(frozen=True)
class Cold:
    """A first step, with nothing in the caches of compilers.

    Attributes:
        seconds: Of the step.
        mebibytes: The largest memory of the process, in and behind it.
    """

    seconds: float
    mebibytes: float


def measure_cold(workload: str, trainer: str) -> Cold:
    """The first step of a trainer, in a process and with a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, workload, trainer]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(command, check=True, capture_output=True, env=environment)
    return Cold(**json.loads(done.stdout.splitlines()[-1]))


def print_table(
    models: Sequence[str], launches: int | None, rounds: int, threads: int | None
) -> None:
    """Measures, and prints a table."""
    # Processes that are ended with this one may have none of their own.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    rows = [["model", "step of compiled SGD", *(f"{name} / it" for name in TRAINERS[1:])]]
    rows.append(["---"] + ["---:"] * (len(rows[0]) - 1))
    firsts = [["model", *(f"{name}: first step, memory" for name in TRAINERS)]]
    firsts.append(["---"] + ["---:"] * len(TRAINERS))
    for model in models:
        workload = WORKLOADS[model]
        print(f"Measuring: {workload.description}", file=sys.stderr)
        starts = {name: partial(TrainingProcess, model, name, threads) for name in TRAINERS}
        timings, failures = time_launches(starts, launches or 1, rounds)
        if failures:
            raise RuntimeError("; ".join(f"{name}: {text}" for name, text in failures.items()))
        baseline = timings[TRAINERS[0]]
        ratios = [with_quartiles(timings[name].over(baseline)) for name in TRAINERS[1:]]
        rows.append([workload.description, f"{1000 * median(baseline.seconds):.1f} ms", *ratios])
        cold = [measure_cold(model, name) for name in TRAINERS]
        cells = [f"{x.seconds:.1f} s, {x.mebibytes:.0f} MiB" for x in cold]
        firsts.append([workload.description, *cells])
    print(f"{as_table(rows)}\n\n{as_table(firsts)}")


def main(workload: str, trainer: str) -> None:
    """Makes some steps, and prints what the first has taken."""
    made = make_trainer(WORKLOADS[workload], trainer)
    start = time.perf_counter()
    made.step()
    seconds = time.perf_counter() - start
    for _ in range(3):
        made.step()
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "mebibytes": largest}))


if __name__ == "__main__":
    main(*sys.argv[1:])
