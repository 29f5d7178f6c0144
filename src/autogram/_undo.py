"""Undoes changes that would outlive a call, whatever happens, even if an interrupt strikes.

Python may raise a `KeyboardInterrupt` at the beginning of a function and after any call, even at
the first line of the code that undoes a change. Remaining changes are undone when the outermost
call ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

F = TypeVar("F", bound=Callable[..., Any])


class _Here(threading.local):
    """The blocks of a thread, the innermost one last."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


_HERE = _Here()


class _Block:
    """A block of :func:`undone`."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        _HERE.blocks.append(self)

    def __exit__(self, *_: object) -> None:
        blocks = _HERE.blocks
        while self in blocks:  # includes blocks inside it that an interrupt kept from ending
            blocks[-1]._undo()
            blocks.pop()


def undone(undo: Callable[[], object]) -> AbstractContextManager[None]:
    """A block whose change is undone at its end.

    Args:
        undo: Undoes the change. It may be called before the change is made, and more than once.
    """
    return _Block(undo)


class _Modes:
    """PyTorch's modes in this thread: stacks, and the top of each."""

    def __init__(self) -> None:
        self._transforms = torch._C._functorch.maybe_current_level() or 0
        self._functions = torch._C._len_torch_function_stack()
        self._operators = torch._C._len_torch_dispatch_stack()

    def restore(self) -> None:
        """Removes modes that were left on the stacks."""
        while (torch._C._functorch.maybe_current_level() or 0) > self._transforms:
            torch._C._functorch._vmap_decrement_nesting()
        while torch._C._len_torch_function_stack() > self._functions:
            overrides._pop_mode()
        while torch._C._len_torch_dispatch_stack() > self._operators:
            dispatch._pop_mode()


def undoing(function: F) -> F:
    """Makes a function undo all changes if it raises, in its own blocks and in PyTorch's.

    PyTorch's own blocks, such as `torch.no_grad`, have points at which an interrupt leaves the
    inner mode on. The state of autograd and autocast is restored in C, without interrupts.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_on, modes = torch.is_grad_enabled(), _Modes()
        with torch._C._InferenceMode(torch.is_inference_mode_enabled()):
            torch._C._set_grad_enabled(is_on)  # the block above has changed it
            with undone(modes.restore):
                return function(*args, **kwargs)

    return cast("F", run)
