"""Command line of the benchmark: `python -m tests.speed`."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torchjd.autogram import Engine as TorchjdEngine

from autogram import Engine

from .breakdown import PHASES, profile_gramian, time_phases
from .measure import (
    BASELINE,
    EngineFactory,
    FusedEngine,
    GramianEngine,
    Trainer,
    gramian_error,
    time_steps,
)
from .report import Line, Outcome, describe_machine, make_table
from .workloads import WORKLOADS, Workload


def _make_torchjd_engine(model: nn.Module) -> GramianEngine:
    return TorchjdEngine(model, batch_dim=0)


ENGINES: dict[str, EngineFactory] = {
    "autogram": Engine,
    "fused": FusedEngine,
    "torchjd": _make_torchjd_engine,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    options = _parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    engines = {name: ENGINES[name] for name in ENGINES if options.torchjd or name != "torchjd"}
    workloads = [WORKLOADS[name] for name in options.model or WORKLOADS]
    lines = [compare(workload, engines, options.rounds) for workload in workloads]

    print(f"{describe_machine()}\n\n{make_table(lines)}")
    if options.profile:
        for workload in workloads:
            print(f"\n{explain(workload)}")
    if options.json is not None:
        results = {"machine": describe_machine(), "lines": [asdict(line) for line in lines]}
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def compare(workload: Workload, engines: dict[str, EngineFactory], rounds: int) -> Line:
    """Check and time all engines on one workload."""
    print(f"Measuring: {workload.description}", file=sys.stderr)
    outcomes: dict[str, Outcome] = {}
    trainers = {BASELINE: Trainer(workload)}
    for name, make_engine in engines.items():
        try:
            outcomes[name] = Outcome(
                error=gramian_error(workload, make_engine), remark=workload.remarks.get(name, "")
            )
            trainers[name] = Trainer(workload, make_engine)
            trainers[name].step()
        except Exception as error:  # any failure of an engine is a result, and the rest goes on
            reason = f"{type(error).__name__}: {error}".split("\n")[0].split(". ")[0]
            outcomes[name] = Outcome(failure=reason[:120])
            trainers.pop(name, None)

    timings = time_steps({name: trainer.step for name, trainer in trainers.items()}, rounds)
    baseline = timings.pop(BASELINE)
    for name, timing in timings.items():
        outcomes[name] = replace(outcomes[name], ratio=timing.over(baseline))
    return Line(workload.description, median(baseline.seconds), outcomes)


def explain(workload: Workload) -> str:
    """The phases of both steps, and the operations inside autogram's Gramian."""
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
        "--model", action="append", choices=WORKLOADS, help="one to measure; all if not given"
    )
    parser.add_argument("--rounds", type=int, default=10, help="rounds, each in both orders of run")
    parser.add_argument("--threads", type=int, help="threads of PyTorch; its own choice by default")
    parser.add_argument(
        "--torchjd", action=argparse.BooleanOptionalAction, default=True, help="its engine as well"
    )
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", type=Path, help="file for the results, with both orders of run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
