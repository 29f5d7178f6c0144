"""Command line of the benchmark: `python -m tests.speed`."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from . import compiled
from .against import compare_trees, make_table_of_trees
from .breakdown import PHASES, profile_gramian, time_phases
from .gpu import __main__ as gpu
from .measure import gramian_error
from .process import TrainingProcess, time_launches
from .report import Line, Outcome, describe_machine, make_table
from .training import BASELINE, ENGINES, Trainer
from .weightings import SIZES, print_tables
from .workloads import WORKLOADS, Workload


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    options = _parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    models = options.model or list(WORKLOADS)
    if options.against is not None:
        sizes = (options.launches, options.rounds, options.threads)
        found = [line for model in models for line in compare_trees(model, options.against, *sizes)]
        print(f"{describe_machine()}\n\n{make_table_of_trees(found)}")
        _write(options.json, found)
        return
    if options.gpu:
        gpu.main(["--device", "cuda"])
        return
    if options.compiled:
        print(f"{describe_machine()}\n")
        compiled.print_table(models, options.launches, options.rounds, options.threads)
        return
    if options.weightings:
        print(f"{describe_machine()}\n")
        print_tables(options.device, options.largest)
        return
    engines = [name for name in ENGINES if options.torchjd or name != "torchjd"]
    lines = [
        compare(model, engines, options.launches, options.rounds, options.threads)
        for model in models
    ]

    print(f"{describe_machine()}\n\n{make_table(lines)}")
    if options.profile:
        for model in models:
            print(f"\n{explain(model)}")
    _write(options.json, lines)
    if options.model is None:
        print()
        print_tables(options.device, options.largest)


def _write(path: Path | None, lines: Sequence[Any]) -> None:
    """Write results into a file, if there is one."""
    if path is not None:
        results = {"machine": describe_machine(), "lines": [asdict(line) for line in lines]}
        path.write_text(json.dumps(results, indent=2) + "\n")


def compare(
    model: str,
    engines: Sequence[str],
    launches: int | None,
    rounds: int,
    threads: int | None = None,
) -> Line:
    """Check and time some engines on one workload."""
    workload = WORKLOADS[model]
    print(f"Measuring: {workload.description}", file=sys.stderr)
    outcomes = {name: _check(workload, name) for name in engines}
    running = [BASELINE, *(name for name in engines if outcomes[name].failure is None)]
    starts = {name: partial(TrainingProcess, model, name, threads) for name in running}
    timings, failures = time_launches(starts, launches or workload.launches, rounds)
    if BASELINE in failures:
        raise RuntimeError(failures[BASELINE])
    outcomes |= {name: _failure(reason) for name, reason in failures.items()}
    baseline = timings.pop(BASELINE)
    for name, timing in timings.items():
        outcomes[name] = replace(outcomes[name], ratio=timing.over(baseline))
    return Line(workload.description, median(baseline.seconds), outcomes)


def _check(workload: Workload, engine: str) -> Outcome:
    """The error of an engine."""
    try:
        error = gramian_error(workload, ENGINES[engine])
    except Exception as failure:  # any failure of an engine is a result, and the rest goes on
        return _failure(f"{type(failure).__name__}: {failure}")
    return Outcome(error=error, remark=workload.remarks.get(engine, ""))


def _failure(reason: str) -> Outcome:
    """The outcome of an engine that does not run, with the first sentence of the reason."""
    return Outcome(failure=reason.split("\n")[0].split(". ")[0][:120])


def explain(model: str) -> str:
    """The phases of both steps, and the operations inside autogram's Gramian."""
    workload = WORKLOADS[model]
    trainers = {name: Trainer(workload, ENGINES.get(name)) for name in (BASELINE, "autogram")}
    text = [f"{workload.description}: milliseconds of each phase"]
    for name, trainer in trainers.items():
        for _ in range(3):
            trainer.step()
        phases = time_phases(trainer, steps=10)
        text.append(f"{name:>10}: " + ", ".join(f"{p} {1000 * phases[p]:.1f}" for p in PHASES))
    return "\n".join([*text, *map(str, profile_gramian(trainers["autogram"])[:15])])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.speed", description=__doc__)
    parser.add_argument(
        "--compiled", action="store_true", help="measure compiled models, over compiled SGD"
    )
    parser.add_argument(
        "--model", action="append", choices=WORKLOADS, help="one to measure; all if not given"
    )
    parser.add_argument(
        "--launches", type=int, help="how often processes start anew; the model's own by default"
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds of a launch, each in both orders of run"
    )
    parser.add_argument("--threads", type=int, help="threads of PyTorch; its own choice by default")
    parser.add_argument(
        "--torchjd", action=argparse.BooleanOptionalAction, default=True, help="its engine as well"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="SRC",
        help="compare with the package `autogram` in this folder, and with nothing else",
    )
    parser.add_argument(
        "--weightings",
        action="store_true",
        help="time weightings and whole steps, and nothing else",
    )
    parser.add_argument("--device", default="cpu", help="where weightings are timed")
    parser.add_argument(
        "--gpu",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available() and not arguments and len(sys.argv) < 2,
        help="the benchmark of a GPU, `tests.speed.gpu`, as without any option where there is one",
    )
    parser.add_argument(
        "--largest", type=int, default=SIZES[-1], help="the most objectives of a weighting"
    )
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", type=Path, help="file for the results, with both orders of run")
    options = parser.parse_args(arguments)
    if options.against is not None and not (options.against / "autogram" / "__init__.py").is_file():
        parser.error(f"there is no package `autogram` in {options.against}")
    return options


if __name__ == "__main__":
    main()
