"""Command line of the benchmark on a GPU: ``python -m tests.speed.gpu --help``."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from statistics import median
from typing import Literal, get_args

import torch

from autogram import Engine
from tests.speed import choices, limits
from tests.speed.measure import gramian_error
from tests.speed.report import as_table
from tests.speed.training import ENGINES
from tests.speed.workloads import Workload

from .models import TINY, WORKLOADS, Logits
from .steps import PRECISIONS, STEPS, Backward, Precision, Problem, precision

Mode = Literal["eager", "captured", "compiled"]

# Verification falls into the calls 1, 2, 4, 8, 16 and 32, and into none of the next ones. Programs
# are written by then.
WARM_UP = 33
MEASURED = 10


@dataclass(frozen=True)
class Result:
    """What a step took: its median milliseconds, and the peak of memory in bytes."""

    milliseconds: float
    peak: int


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
    _stop()
    if options.device == "cuda" and not (options.tiny or options.model):
        choices.show(options.device)
        limits.main(["--device", options.device])
    if options.errors:
        print("Errors of the Gramian in float64, against autograd:\n")
        for name in names:
            found = [f"{gramian_error(workloads[name], ENGINES[x]):.0e}" for x in ENGINES]
            print(as_table([[workloads[name].description, *found]]), flush=True)


Case = tuple[str, bool, Precision, str, Mode]
"""The name of a workload, whether it is a tiny one, the precision, the device, and the mode."""


def _row(description: str, case: Case, steps: Sequence[str]) -> list[str]:
    """One line of a table."""
    cells, baseline = [description], None
    for name in steps:
        try:
            result = _apart(case, name) if case[3] == "cuda" else _measure(case, name)
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


_WORKERS: list[ProcessPoolExecutor] = []


def _apart(case: Case, name: str) -> Result:
    """Measures in another process, which ends after an error.

    A capture that fails leaves PyTorch's allocator and generator as if it still went on, and what
    comes later in that process would fail, too.
    """
    if not _WORKERS:
        _WORKERS.append(ProcessPoolExecutor(1, get_context("spawn")))
    try:
        return _WORKERS[0].submit(_measure, case, name).result()
    except Exception:
        _stop()
        raise


def _stop() -> None:
    """Ends the other process, if there is one."""
    while _WORKERS:
        _WORKERS.pop().shutdown()


def _measure(case: Case, name: str) -> Result:
    """Measures one step."""
    model, is_tiny, how, device, mode = case
    workload = (TINY if is_tiny else WORKLOADS)[model]
    return measure(workload, STEPS[name], how, device, mode)


def measure(
    workload: Workload,
    make: Callable[[Problem], Backward],
    how: Precision,
    device: str,
    mode: Mode = "eager",
) -> Result:
    """Time whole steps: forward pass, backward pass and update."""
    gc.collect()
    problem = Problem.make(workload, device)
    if isinstance(problem.model, Logits):
        problem.model.is_captured = mode == "captured"
    backward = make(problem)
    if mode == "compiled":
        backend = "inductor" if backward.engine is None else "autogram"
        problem.call = torch.compile(problem.model, backend=backend)

    def step() -> None:
        with precision(how, device):
            losses = problem.losses()
            backward.function(losses)
        problem.optimizer.step()
        problem.optimizer.zero_grad()

    if device != "cuda":
        for _ in range(WARM_UP):
            step()
        times = []
        for _ in range(MEASURED):
            start = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - start))
        return Result(median(times), 0)
    torch.cuda.empty_cache()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
        stream.synchronize()
        torch.cuda.reset_peak_memory_stats()  # a captured step takes its memory when it is captured
        run = _captured(step, backward.engine) if mode == "captured" else step
        run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(MEASURED + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        stream.synchronize()
    times = [before.elapsed_time(after) for before, after in pairwise(events)]
    return Result(median(times), torch.cuda.max_memory_allocated())


def _captured(step: Callable[[], None], engine: Engine | None) -> Callable[[], None]:
    """Replays of a step."""
    if engine is not None:
        engine.prepare_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph.replay


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
