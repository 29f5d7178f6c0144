"""Steps inside of a CUDA graph: nothing is read on the host, and results are left on the device.

A replay repeats only the work of the device. The device compares the constants that decide where
samples lie with those of the captured step, and keeps whether they differed until it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autogram._errors import StaleCaptureError, UnsupportedError


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
                "A step is captured into a CUDA graph, and the engine is not prepared for it: what "
                "it has to find out, it can find out in eager steps only. Run the step as it is a "
                "few times. Call `engine.prepare_capture()` then, and capture the step."
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
        """Raises if a replay was not right, and begins anew. Waits for the device.

        Raises:
            StaleCaptureError: A boolean was true.
        """
        found = [bool(is_wrong) for is_wrong in self._is_wrong.values()]
        for is_wrong in self._is_wrong.values():
            is_wrong.zero_()
        if any(found):
            raise StaleCaptureError(
                "A captured step was replayed with index values or masks that move samples to "
                "other places, or with gradients where there were none: its results since the last "
                "check are in doubt. Take the parameters from before, run the step eagerly with "
                "such values, call `engine.prepare_capture()`, and capture the step again."
            )
