"""Delays interrupts while ranks exchange data, because they could stop a rank anywhere.

Python calls signal handlers in the main thread, between any two lines. A handler that raises
could stop a rank between calls that the others still make.
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
    """Replaces a signal handler, and calls it later."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self.has_come = False

    def __call__(self, *_: object) -> None:
        self.has_come = True


@contextmanager
def held(*, are_held: bool = True) -> Iterator[None]:
    """Delays signals in a block; or, within such a block, lets them through.

    Signals that came in the meantime are raised where they are let through again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = any(isinstance(signal.getsignal(number), _Later) for number in _SIGNALS)
    with undone(partial(_hold, are_held=before)):
        _hold(are_held=are_held)
        yield


def _hold(*, are_held: bool) -> None:
    """Delays signals, or lets them through. May be called more than once."""
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
