"""Streams of a GPU: a pass's results are taken in on the streams of the thread that made the pass.

Autograd runs each node on the stream of its forward call, with a thread for each device. At the end
of a pass, the streams of its caller wait for streams that computed gradients of leaves. Taps
compute none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor


class Streams:
    """The streams on which this thread launches work for some devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        of_gpus = {device for device in devices if device.type == "cuda"}
        self._own = {device: torch.accelerator.current_stream(device) for device in of_gpus}

    def take(self, tensors: Sequence[Tensor]) -> bool:
        """Makes these streams wait for tensors that this thread computes, and keeps their memory.

        The first tensor tells the device. Returns whether this thread already launches its work on
        these streams, because asking PyTorch again would take as long as a small operation.
        """
        device = tensors[0].device
        own = self._own.get(device)
        if own is None or own == (current := torch.accelerator.current_stream(device)):
            return own is not None and len(self._own) == 1
        own.wait_stream(current)
        for tensor in tensors:
            if tensor.device == device:
                tensor.record_stream(own)
        return False

    def enter(self) -> ExitStack:
        """Launches this thread's work on these streams, until the stack is left."""
        stack = ExitStack()
        for device, own in self._own.items():
            if own != torch.accelerator.current_stream(device):
                stack.enter_context(own)
        return stack
