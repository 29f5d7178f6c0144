"""Steps inside of a CUDA graph: nothing is read on the host, and results are left on the device.

A replay repeats only the work of the device. The device compares the constants that decide where
samples are with those of the captured step, and keeps whether they differed until it is read. In
other steps, a flag has that, and is read without waiting for later work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autogram.errors import StaleCaptureError, UnsupportedError


def is_captured(device: torch.device) -> bool:
    """Whether work for a device becomes part of a CUDA graph now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Replays:
    """Whether replays of captured steps were right, for all steps of one engine."""

    def __init__(self) -> None:
        self._is_wrong: dict[torch.device, Tensor] = {}

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Begins anew, in memory that belongs to no CUDA graph."""
        self._is_wrong = {
            device: torch.zeros((), dtype=torch.bool, device=device) for device in devices
        }

    def check_prepared(self) -> None:
        """Raises unless steps may be captured."""
        if not self._is_wrong:
            raise UnsupportedError(
                "A step is captured into a CUDA graph, and the engine is not prepared for it: only "
                "eager steps can find the samples. Run the step eagerly a few times. Call "
                "`engine.prepare_capture()` then, and capture the step."
            )

    def add(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Lets each replay read some booleans on its device, none of which may be true.

        Returns:
            The booleans on other devices, which no replay computes again.
        """
        for device, is_wrong in self._is_wrong.items():
            if some := [value for value in values if value.device == device]:
                is_wrong.logical_or_(torch.stack(some).any())
        return [value for value in values if value.device not in self._is_wrong]

    def check(self) -> None:
        """Raises if a replay was not right, and begins anew. Waits for the device."""
        found = [bool(is_wrong) for is_wrong in self._is_wrong.values()]
        for is_wrong in self._is_wrong.values():
            is_wrong.zero_()
        if any(found):
            raise StaleCaptureError(
                "A captured step was replayed with index values or masks that move samples to "
                "other places, with gradients where there were none, or with weights that are not "
                "finite: its results since the last check are in doubt. Take the parameters from "
                "before that check, run the step eagerly with such values, call "
                "`engine.prepare_capture()`, and capture the step again."
            )


class Flag:
    """Whether any of some boolean tensors without dimensions, on any devices, is true.

    On a GPU, the values are copied after the work that was launched before. Reading the flag waits
    for this work alone, and not for work that was launched later.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        for device in {value.device for value in values}:
            here = [x for x in values if x.device == device]
            value = here[0] if len(here) == 1 else torch.stack(here).any()
            if value.is_cuda:
                copy = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
                value = copy.copy_(value, non_blocking=True)
                self._events.append(torch.cuda.current_stream(device).record_event())
            self._values.append(value)

    @property
    def is_ready(self) -> bool:
        """Whether the flag can be read without waiting."""
        return not self._events

    @property
    def has_arrived(self) -> bool:
        """Whether the flag can be read without waiting by now. A captured step may not ask."""
        if self._events and torch.cuda.is_current_stream_capturing():
            return False
        return all(event.query() for event in self._events)

    def read(self) -> bool:
        """The value, after waiting for it."""
        for event in self._events:
            event.synchronize()
        return any(bool(value) for value in self._values)
