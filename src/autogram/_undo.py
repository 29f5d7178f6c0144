"""Undoes changes that would outlive a call, whatever happens: even if an interrupt strikes.

Python raises a `KeyboardInterrupt` at the beginning of a function and after any call, even at the
first line of the code that undoes a change. Remaining changes are undone when the outermost call
ends.
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
        while self in blocks:  # and blocks inside it that an interrupt has kept from ending
            blocks[-1]._undo()
            blocks.pop()


def undone(undo: Callable[[], object]) -> AbstractContextManager[None]:
    """A block in which a change is made that is undone at its end.

    Args:
        undo: Undoes the change. It may be called before the change was made, and more than once.
    """
    return _Block(undo)


class _Modes:
    """PyTorch's modes in this thread: stacks, and what is on top of each."""

    def __init__(self) -> None:
        self._transforms = torch._C._functorch.maybe_current_level() or 0
        self._functions = torch._C._len_torch_function_stack()
        self._operators = torch._C._len_torch_dispatch_stack()

    def restore(self) -> None:
        """Takes off what was left on the stacks."""
        while (torch._C._functorch.maybe_current_level() or 0) > self._transforms:
            torch._C._functorch._vmap_decrement_nesting()
        while torch._C._len_torch_function_stack() > self._functions:
            overrides._pop_mode()
        while torch._C._len_torch_dispatch_stack() > self._operators:
            dispatch._pop_mode()


def undoing(function: F) -> F:
    """A function that leaves nothing undone if it raises, in its own blocks and in PyTorch's.

    PyTorch's own blocks, such as `torch.no_grad`, have places at which an interrupt leaves the mode
    as it is inside. The state of autograd and autocast is put back in C, where none can strike.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_on, modes = torch.is_grad_enabled(), _Modes()
        with torch._C._InferenceMode(torch.is_inference_mode_enabled()):
            torch._C._set_grad_enabled(is_on)  # which the block before has changed
            with undone(modes.restore):
                return function(*args, **kwargs)

    return cast("F", run)
