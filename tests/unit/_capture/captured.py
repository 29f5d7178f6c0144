"""Steps that are captured into a CUDA graph, without a GPU, for tests of the folders beside."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from autogram._capture.backward import driver
from tests.unit.waits import Waits


@contextmanager
def captured() -> Iterator[Waits]:
    """A block whose work counts as part of a CUDA graph. Gives what waits for a device in it."""
    with mock.patch.object(driver, "is_captured", return_value=True), Waits() as waits:
        yield waits
