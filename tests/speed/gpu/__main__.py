"""Command line of the benchmark on a GPU: ``python -m tests.speed.gpu --help``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

import torch

from tests.speed import choices, limits
from tests.speed.measure import gramian_error
from tests.speed.report import as_table
from tests.speed.training import ENGINES

from .measured import Case, Mode, apart, stop
from .models import TINY, WORKLOADS
from .steps import PRECISIONS, STEPS


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table for each precision."""
    options = _parse(arguments)
    workloads = TINY if options.tiny else WORKLOADS
    names = options.model or list(workloads)
    modes: list[Mode] = ["eager", "captured"] if options.device == "cuda" else ["eager"]
    modes = options.mode or modes
    steps = ["SGD", *[x for x in options.step or STEPS if x != "SGD"]]
    print(f"{_describe(options.device)}\n")
    for how in options.precision or PRECISIONS:
        for mode in modes:
            print(f"{how}, {mode}: time / SGD, peak / SGD\n")
            print(as_table([["model", *steps], ["---"] * (len(steps) + 1)]))
            for name in names:
                case = name, options.tiny, how, options.device, mode
                row = _row(workloads[name].description, case, steps)
                print(as_table([row]), flush=True)
            print()
    stop()
    if options.device == "cuda" and not (options.tiny or options.model):
        choices.show(options.device)
        limits.main(["--device", options.device])
    if options.errors:
        print("Errors of the Gramian in float64, against autograd:\n")
        for name in names:
            found = [f"{gramian_error(workloads[name], ENGINES[x]):.0e}" for x in ENGINES]
            print(as_table([[workloads[name].description, *found]]), flush=True)


def _row(description: str, case: Case, steps: Sequence[str]) -> list[str]:
    """One line of a table."""
    cells, baseline = [description], None
    for name in steps:
        try:
            result = apart(case, name)
        except Exception as error:  # what an engine cannot do is a result
            cells.append(type(error).__name__)
            continue
        if baseline is None:
            baseline = result
            cells.append(f"{result.milliseconds:.2f} ms, {result.peak / 2**20:.0f} MiB")
        else:
            peak = result.peak / max(1, baseline.peak)
            cells.append(f"{result.milliseconds / baseline.milliseconds:.2f}, {peak:.2f}")
    return cells


def _describe(device: str) -> str:
    """The device in words."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.speed.gpu", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    parser.add_argument("--model", action="append", choices={**WORKLOADS, **TINY})
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--step", action="append", choices=STEPS, help="beside SGD; else all")
    parser.add_argument(
        "--mode", action="append", choices=get_args(Mode), help="else eager, and captured on a GPU"
    )
    parser.add_argument("--errors", action="store_true", help="those of the Gramians as well")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models, to see that everything runs"
    )
    options = parser.parse_args(arguments)
    if options.device == "cpu" and "captured" in (options.mode or ()):
        parser.error("a step is captured on a GPU alone")
    return options


if __name__ == "__main__":
    main()
