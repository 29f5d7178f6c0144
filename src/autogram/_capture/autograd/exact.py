"""Blocks in which products are computed: without a graph, without autocast and inference mode.

And the dtype of autocast, for calls of the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from autogram._undo import undone
from autogram.errors import UnsupportedError


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Disables gradients, autocast and inference mode in a block, whatever modes the user has.

    Raises:
        UnsupportedError: PyTorch has no operation that is needed for numbers in float8.
    """
    # In inference mode, tensors do not count changes in place.
    with torch.inference_mode(mode=False), torch.no_grad(), without_autocast(device):
        try:
            yield
        except RuntimeError as error:
            if "Float8" not in str(error):
                raise
            raise UnsupportedError(
                "A parameter or an activation in float8 has gradients, and PyTorch can neither "
                "add nor compare float8 numbers. Keep it in a wider dtype, and round it with a "
                "custom autograd Function whose gradient is in that dtype, or freeze it. PyTorch "
                f"says: {error}"
            ) from error


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Disables autocast in a block, on a device and on the CPU."""
    if not torch._C._is_any_autocast_enabled():
        yield
        return
    devices = [x for x in {device.type, "cpu"} if torch.is_autocast_enabled(x)]

    def enable(*, is_on: bool) -> None:
        for x in devices:
            torch.set_autocast_enabled(x, is_on)

    with undone(partial(enable, is_on=True)):
        enable(is_on=False)
        yield


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype in which autocast computes on a kind of device now, or ``None`` if it is off."""
    # A tensor on the meta device may not be asked about.
    if not torch._C._is_any_autocast_enabled() or device == "meta":
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
