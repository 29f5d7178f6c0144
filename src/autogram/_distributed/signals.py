"""Interrupts wait while ranks exchange data: nobody could tell how far a rank had come.

Python calls handlers of signals in the main thread, between any two lines. A handler that raises
would leave a rank somewhere between calls that the others make, too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from autogram._undo import undone

_NAMES = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGTERM", "SIGINT")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class _Later:
    """In the place of a handler, which is called later."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self.has_come = False

    def __call__(self, *_: object) -> None:
        self.has_come = True


@contextmanager
def held(*, are_held: bool = True) -> Iterator[None]:
    """Lets signals wait in a block; or lets them through, inside of a block in which they wait.

    Where signals are let through again, those that have come are raised.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = any(isinstance(signal.getsignal(number), _Later) for number in _SIGNALS)
    with undone(partial(_hold, are_held=before)):
        _hold(are_held=are_held)
        yield


def _hold(*, are_held: bool) -> None:
    """Lets signals wait, or lets them through. May be called more than once."""
    come: list[int] = []
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _Later):
            if not are_held:
                signal.signal(number, handler.handler)
                come += [number] if handler.has_come else []
        elif are_held and callable(handler):
            signal.signal(number, _Later(handler))
    for number in come:
        signal.raise_signal(number)
