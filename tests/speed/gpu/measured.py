"""Times and memory of a step, measured in another process.

Such a process imports this file by its name, which it cannot do with a file that is run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from statistics import median
from typing import Literal

import torch

from autogram import Engine
from tests.speed.workloads import Workload

from .models import TINY, WORKLOADS, Logits
from .steps import STEPS, Backward, Precision, Problem, precision

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


Case = tuple[str, bool, Precision, str, Mode]
"""The name of a workload, whether it is a tiny one, the precision, the device, and the mode."""


_WORKERS: list[ProcessPoolExecutor] = []


def apart(case: Case, name: str) -> Result:
    """Measures in another process, which ends after an error.

    A capture that fails leaves PyTorch's allocator and generator as if it still went on, and what
    comes later in that process would fail, too.
    """
    if not _WORKERS:
        _WORKERS.append(ProcessPoolExecutor(1, get_context("spawn")))
    try:
        return _WORKERS[0].submit(measure_case, case, name).result()
    except Exception:
        stop()
        raise


def stop() -> None:
    """Ends the other process, if there is one."""
    while _WORKERS:
        _WORKERS.pop().shutdown()


def measure_case(case: Case, name: str) -> Result:
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
    torch._C._cuda_clearCublasWorkspaces()  # each stream has one, which would count for the next
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
