"""Whether gradients that are not finite are expected, as by a gradient scaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_EXPECTED = ContextVar("_IS_EXPECTED", default=False)


def is_overflow_expected() -> bool:
    """Whether the caller looks for gradients that are not finite, and deals with them."""
    return _IS_EXPECTED.get()


@contextmanager
def expecting_overflow() -> Iterator[None]:
    """Lets calls in a block, in this thread, not warn where an overflow prevents a verification."""
    token = _IS_EXPECTED.set(True)
    try:
        yield
    finally:
        _IS_EXPECTED.reset(token)
