"""Scenarios that run in a few processes of one group, on CPUs."""

import json
import os
import platform
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing

RANKS = 2
# Longer than any scenario takes. If one process fails where the other waits for it, both must end.
_PATIENCE = 300.0

Scenario = Callable[[int], None]
"""What a process does, from its rank. It raises if something is wrong."""


def run_in_two_processes(
    find_scenarios: Callable[[], Mapping[str, Scenario]], folder: Path
) -> dict[str, list[str]]:
    """Runs scenarios one after the other in a group of two new processes."""
    return run_in_processes(find_scenarios, folder, RANKS)


def run_in_processes(
    find_scenarios: Callable[[], Mapping[str, Scenario]], folder: Path, ranks: int
) -> dict[str, list[str]]:
    """Runs scenarios one after the other in a group of new processes.

    Args:
        find_scenarios: Gives the scenarios, in a new process: a function of a module.
        folder: An empty folder, for the files by which processes find each other.
        ranks: How many processes.

    Returns:
        For each scenario that was begun, what each process says: nothing, or a traceback.
    """
    context = torch.multiprocessing.get_context("spawn")
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    store = folder / "store"
    processes = [
        context.Process(target=_run, args=(find_scenarios, rank, ranks, store, file), daemon=True)
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + _PATIENCE
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
    said = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    names: Sequence[str] = list(dict.fromkeys(name for by_name in said for name in by_name))
    return {name: [by_name.get(name, "did not end") for by_name in said] for name in names}


def _run(
    find_scenarios: Callable[[], Mapping[str, Scenario]],
    rank: int,
    ranks: int,
    store: Path,
    file: Path,
) -> None:
    """What one of the processes does."""
    # A process that a shell has started in the background ignores this signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if platform.system() == "Linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(store), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=20),
    )
    said = {}
    for name, scenario in find_scenarios().items():
        torch.manual_seed(0)
        try:
            scenario(rank)
            torch.distributed.barrier()
            said[name] = ""
        except BaseException:  # failures of pytest are no exceptions
            said[name] = traceback.format_exc()
        file.write_text(json.dumps(said))
    torch.distributed.destroy_process_group()
