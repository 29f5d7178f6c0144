"""Drivers: one for each call of an engine that runs at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autogram._capture.backward.driver import Driver


class Drivers:
    """The drivers of an engine, which serve one call at a time each.

    Calls one after the other have the same one, whichever thread they come from, and so they have
    its memory. Calls at the same time, in several threads or inside of one another, have different
    ones, which learn on their own. None waits for another.

    Args:
        make: Makes a driver.

    Attributes:
        last: The driver of the last call that has ended.
    """

    def __init__(self, make: Callable[[], Driver]) -> None:
        self._make = make
        self.last = make()
        self._idle = [self.last]

    @contextmanager
    def one(self) -> Iterator[Driver]:
        """A driver for one call."""
        try:
            driver = self._idle.pop()
        except IndexError:
            driver = self._make()
        try:
            yield driver
        finally:
            self.last = driver
            self._idle.append(driver)
