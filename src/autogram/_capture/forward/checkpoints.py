"""Checkpoints: parts of a forward pass that run again in the backward pass, like the first time.

A second run must save the tensors that the first run has saved, or PyTorch raises an error. So
what decides about taps is noted in the first run, by the part: the engine may be paused in one of
the two runs, may have been made between them, or is asked in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

# The hooks that saved tensors go through, or `None`. A checkpoint sets hooks of its own.
hooks_now: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

# Identifies the call of a module in a checkpoint: the `id` of the module, and its inputs' shapes.
ModuleCall = tuple[int, tuple[tuple[int, ...], ...]]

# By call, whether each input was batched: `None` where calls that cannot be told apart differ.
Calls = dict[ModuleCall, tuple[bool | None, ...]]


class CheckpointRun(NamedTuple):
    """A run of the part of a checkpoint."""

    part: Any
    """What PyTorch keeps of the part as long as it may run again."""
    is_second: bool


def are_of_checkpoint(hooks: Any) -> bool:
    """Whether a checkpoint has set some hooks for saved tensors."""
    return "checkpoint" in getattr(hooks[0], "__module__", "")


def run_now() -> CheckpointRun | None:
    """The run of the innermost checkpoint, or ``None`` outside, or if this cannot be known."""
    hooks = hooks_now(True)
    if hooks is None or not are_of_checkpoint(hooks):
        return None
    pack = unwrap(hooks[0])
    names, cells = pack.__code__.co_freevars, pack.__closure__ or ()
    held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if "frame" in held:
        return CheckpointRun(held["frame"], is_second=False)
    part = held["target_frame_ref"]() if "target_frame_ref" in held else None
    return None if part is None else CheckpointRun(part, is_second=True)


class Checkpoints:
    """What the recordings of an engine were like in checkpoints whose graph is alive."""

    def __init__(self) -> None:
        self._parts: WeakKeyDictionary[Any, Calls] = WeakKeyDictionary()

    def may_record(self) -> bool:
        """Whether a recording may begin or go on here, which is noted: second runs are as first."""
        run = run_now()
        if run is None:
            return True
        if run.is_second:
            return run.part in self._parts
        self._parts.setdefault(run.part, {})
        return True

    def note(self, call: ModuleCall, are_batched: Sequence[bool]) -> None:
        """Notes which inputs of a module were batched, if this is the first run of a checkpoint."""
        run = run_now()
        if run is None or run.is_second:
            return
        calls = self._parts.setdefault(run.part, {})
        before = calls.get(call)
        calls[call] = tuple(are_batched) if before is None else _agreed([before, are_batched])

    def recall(self, call: ModuleCall) -> Sequence[bool | None]:
        """Which inputs of a module were batched in the first run. Empty if nothing is known."""
        run = run_now()
        if run is None:
            return ()
        if run.is_second:
            return self._parts.get(run.part, {}).get(call, ())
        if torch._C._current_graph_task_id() == -1:
            return ()
        # A checkpoint in a checkpoint that runs again is made anew.
        return _agreed([calls[call] for calls in self._parts.values() if call in calls])


def _agreed(several: Sequence[Sequence[bool | None]]) -> tuple[bool | None, ...]:
    """What several calls have in common."""
    return tuple(of[0] if len(set(of)) == 1 else None for of in zip(*several, strict=True))
