"""Passes that begin inside an engine's pass. PyTorch has no hook for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from autogram._capture.autograd.graph import leaves_behind
from autogram._undo import undone
from autogram.hooks.backward import SILENT_PASSES


class Outer(Protocol):
    """An engine's pass."""

    def note_nested(self, changing: Sequence[Tensor]) -> None:
        """Learns of an inner pass, before that pass adds to the gradients of some tensors."""


def running_pass() -> Any:
    """The engine's pass to which the currently running autograd node belongs, or ``None``."""
    return SILENT_PASSES.get(torch._C._current_graph_task_id()) if SILENT_PASSES else None


class _Here(threading.local):
    """The state of a thread."""

    is_ours = False
    """Whether the next pass to begin is an engine's."""
    outer: Outer | None = None
    """The engine's pass around the nested one that runs now."""


_HERE = _Here()
_LOCK = threading.Lock()
_WATCHED: set[Outer] = set()  # running passes of engines
# The arguments of `run_backward` of PyTorch's engine, in order.
_ARGUMENTS = "tensors grad_tensors keep_graph create_graph inputs allow_unreachable accumulate_grad"


def watch(current: Outer) -> None:
    """Notifies a pass of passes that begin inside it, until :func:`unwatch`.

    PyTorch has no hook for this. Its engine is therefore wrapped while a pass of an engine runs.
    The next pass that this thread starts counts as the engine's.
    """
    pytorch: Any = Variable
    with _LOCK:
        _WATCHED.add(current)
        if not isinstance(pytorch._execution_engine, _Watcher):
            pytorch._execution_engine = _Watcher(pytorch._execution_engine)
    _HERE.is_ours = True


def unwatch(current: Outer) -> None:
    """Restores PyTorch's engine when the last pass has ended. May be called more than once."""
    pytorch: Any = Variable
    _HERE.is_ours = False
    if _HERE.outer is current:
        _HERE.outer = None
    with _LOCK:
        _WATCHED.discard(current)
        watcher = pytorch._execution_engine
        if not _WATCHED and isinstance(watcher, _Watcher):
            pytorch._execution_engine = watcher.engine


def is_watched(current: Outer) -> bool:
    """Whether a pass has begun and not ended."""
    return current in _WATCHED


@dataclass
class _Watcher:
    """PyTorch's engine; it notes passes that begin inside engines' passes."""

    engine: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a backward pass."""
        is_ours, _HERE.is_ours = _HERE.is_ours, False
        before = _HERE.outer
        outer = None if is_ours else running_pass() or before
        if outer is None:
            return self.engine.run_backward(*args, **kwargs)
        with undone(partial(setattr, _HERE, "outer", before)):
            _HERE.outer = outer
            named = dict(zip(_ARGUMENTS.split(), args, strict=False))
            outer.note_nested(_changing({**named, **kwargs}))
            return self.engine.run_backward(*args, **kwargs)


def _changing(arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors to whose `.grad` a pass with these arguments may add."""
    if not arguments.get("accumulate_grad"):
        return []
    if inputs := arguments.get("inputs"):
        return [x for x in inputs if isinstance(x, Tensor)]
    return [leaf for output in arguments["tensors"] for leaf in leaves_behind(output)]
