"""Answers: values of tensors, read without waiting for what a device has still to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Answer:
    """Whether any of some flags is set.

    On a GPU, the flags are copied behind the work that was launched before them, so that to read
    the answer waits for that alone, and not for what was launched since.

    Args:
        flags: Boolean tensors without dimensions, on any devices.
    """

    def __init__(self, flags: Sequence[Tensor]) -> None:
        self._flags: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        for device in {flag.device for flag in flags}:
            flag = torch.stack([x for x in flags if x.device == device]).any()
            if flag.is_cuda:
                copy = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
                flag = copy.copy_(flag, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)
            self._flags.append(flag)

    @property
    def is_there(self) -> bool:
        """Whether it can be read without waiting."""
        return not self._events

    def read(self) -> bool:
        """The answer."""
        for event in self._events:
            event.synchronize()
        return any(bool(flag) for flag in self._flags)
