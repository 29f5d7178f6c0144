"""Steps that are captured into a CUDA graph, without a GPU, for tests of the folders beside."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from autogram import _weights
from autogram._capture.backward import driver
from tests.unit.waits import Waits


@contextmanager
def captured() -> Iterator[Waits]:
    """A block whose work counts as part of a CUDA graph. Gives what waits for a device in it."""
    with ExitStack() as stack:
        for module in (driver, _weights):
            stack.enter_context(mock.patch.object(module, "is_captured", return_value=True))
        stack.enter_context(mock.patch.object(_weights, "_is_read_at_once", return_value=False))
        capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        stack.enter_context(capturing)
        yield stack.enter_context(Waits())
