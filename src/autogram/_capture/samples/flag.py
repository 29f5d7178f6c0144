"""A boolean that a device computes, read without waiting for later work of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Flag:
    """Whether any of some boolean tensors without dimensions, on any devices, is true.

    On a GPU, the values are copied after the work that was launched before. Reading the flag waits
    for this work alone, and not for work that was launched later.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        for device in {value.device for value in values}:
            value = torch.stack([x for x in values if x.device == device]).any()
            if value.is_cuda:
                copy = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
                value = copy.copy_(value, non_blocking=True)
                self._events.append(torch.cuda.current_stream(device).record_event())
            self._values.append(value)

    @property
    def is_ready(self) -> bool:
        """Whether the flag can be read without waiting."""
        return not self._events

    def read(self) -> bool:
        """The value, after waiting for it."""
        for event in self._events:
            event.synchronize()
        return any(bool(value) for value in self._values)
