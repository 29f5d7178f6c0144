"""Trainers in processes of their own, as training runs are.

In one process, trainers share its memory: what one of them keeps spares the next from asking the
system for more. Even alone, how often a process asks depends on where its memory happens to lie,
which changed the time of a step of gradient descent by a third. So there are many, one by one.
"""

import multiprocessing
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from .training import BASELINE, ENGINES, Trainer
from .workloads import WORKLOADS

# Planning, lazy initialisations, and verification of the first calls. That of the 16th is past, and
# the next one is that of the 32nd.
_WARM_UP = 17


class TrainingProcess:
    """A trainer that warms up, and then waits for visits.

    Args:
        workload: The name of what it trains.
        engine: The name of its engine, or of the baseline.
        threads: How many PyTorch uses; its own choice if `None`.
    """

    def __init__(self, workload: str, engine: str, threads: int | None = None) -> None:
        # Spawned and not forked: it inherits no memory.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, workload, engine, threads), daemon=True
        )
        self._process.start()
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

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, workload: str, engine: str, threads: int | None) -> None:
    """Answers each visit until the connection is closed: with seconds, or with what failed."""
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        make_engine = None if engine == BASELINE else ENGINES[engine]
        trainer = Trainer(WORKLOADS[workload], make_engine)
        _time(trainer, _WARM_UP)
        while True:
            repeats = connection.recv()
            _time(trainer, 1)
            connection.send(_time(trainer, repeats))
    except EOFError:
        return
    except Exception as error:  # any failure of an engine is a result
        connection.send(f"{type(error).__name__}: {error}")


def _time(trainer: Trainer, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        trainer.step()
    return (time.perf_counter() - start) / repeats
