"""Blocks for computing products: without a graph, without autocast and inference mode.

Also tells the dtype of autocast, for calls of the user.
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
        UnsupportedError: PyTorch lacks an operation that float8 numbers need.
    """
    # In inference mode, tensors do not count in-place changes.
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
    """The dtype that autocast uses now on a kind of device, or ``None`` if it is off."""
    # PyTorch refuses the question for the meta device.
    if not torch._C._is_any_autocast_enabled() or device == "meta":
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
