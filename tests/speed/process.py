"""Trainers in processes of their own, as training runs are.

In one process, trainers share its memory: what one of them keeps spares the next from asking the
system for more. Even alone, how often a process asks depends on where its memory happens to lie,
which changed the time of a step of gradient descent by a third. So there are many, one by one.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from .measure import Timing, Visit, count_repeats, time_steps
from .memory import peak_of, resident
from .rows import OPACUS, VMAP, make_any_trainer
from .training import Trainer
from .workloads import WORKLOADS

# Planning, lazy initialisations, programs, and verification of the first calls. That of the 32nd is
# past, and the next one is that of the 64th. Other libraries have none of these, and slow steps.
_WARM_UP = 33
_WARM_UP_OTHERS = 5
_OTHERS = ("torchjd", OPACUS, VMAP)


class TrainingProcess:
    """A trainer that warms up, and then waits for visits.

    Args:
        workload: The name of what it trains.
        engine: The name of its engine, or of the baseline.
        threads: How many PyTorch uses; its own choice if `None`.
        source: The folder that `autogram` is imported from; that of this process if `None`.
        clock: What reads the time: of the wall, or `time.process_time` on a machine that is busy.
    """

    def __init__(
        self,
        workload: str,
        engine: str,
        threads: int | None = None,
        source: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # Spawned and not forked: it inherits no memory.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, workload, engine, threads, clock), daemon=True
        )
        path = list(sys.path)
        if source is not None:
            sys.path.insert(0, str(source.resolve()))  # a spawned process has this one's path
        try:
            self._process.start()
        finally:
            sys.path[:] = path
        theirs.close()

    def visit(self, repeats: int) -> float:
        """Mean seconds of some steps in a row, after one that brings back what caches forgot.

        Raises:
            RuntimeError: It does not run; the message is that of the error there.
        """
        with suppress(BrokenPipeError):  # after a failure, which waits to be read
            self._connection.send(repeats)
        try:
            answer = self._connection.recv()
        except EOFError:
            answer = "The process has ended."
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return float(answer)

    def peak(self) -> int:
        """Bytes of memory that a step needs at most, apart from what was there before the first."""
        return int(self.visit(0))

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def time_launches(
    starts: Mapping[str, Callable[[], TrainingProcess]], launches: int, rounds: int
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times of a step of some trainers, whose processes start anew some times.

    Args:
        starts: What starts the process of each trainer.
        launches: How often they start.
        rounds: Of each launch, each in both orders.

    Returns:
        The times of the trainers that run, and why the others do not.
    """
    timings: dict[str, Timing] = {}
    failures: dict[str, str] = {}
    repeats: dict[str, int] = {}
    for _ in range(launches):
        with ExitStack() as stack:
            visits: dict[str, Visit] = {}
            for name in [name for name in starts if name not in failures]:
                process = stack.enter_context(closing(starts[name]()))
                try:
                    process.visit(1)  # warms up, before the next one does
                except RuntimeError as error:
                    failures[name] = str(error)
                else:
                    visits[name] = process.visit
            repeats = repeats or {name: count_repeats(visit) for name, visit in visits.items()}
            for name, timing in time_steps(visits, repeats, rounds).items():
                timings.setdefault(name, Timing()).extend(timing)
    return {name: timings[name] for name in timings if name not in failures}, failures


def _serve(
    connection: Connection,
    workload: str,
    engine: str,
    threads: int | None,
    clock: Callable[[], float],
) -> None:
    """Answers each visit until the connection is closed: with seconds, or with what failed."""
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        trainer = make_any_trainer(WORKLOADS[workload], engine)
        before = resident()
        _time(trainer, _WARM_UP_OTHERS if engine in _OTHERS else _WARM_UP, clock)
        while True:
            repeats = connection.recv()
            if repeats == 0:
                connection.send(peak_of(trainer.step) - before)
                continue
            _time(trainer, 1, clock)
            connection.send(_time(trainer, repeats, clock))
    except EOFError:
        return
    except Exception as error:  # any failure of an engine is a result
        connection.send(f"{type(error).__name__}: {error}")


def _time(trainer: Trainer, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        trainer.step()
    return (clock() - start) / repeats
