"""Where Gramians and other products are computed: no graph, no autocast, no inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch


def exact(device: torch.device) -> AbstractContextManager[None]:
    """Lets nothing inside be a part of a graph, and all be exact whatever the user's modes.

    Each mode is left only where one is on, as to leave it takes longer than a small product. In
    inference mode, tensors would not count their changes in place.

    Args:
        device: That of the losses.
    """
    is_plain = not (torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled())
    return torch.no_grad() if is_plain else _outside_of_modes(device)


@contextmanager
def _outside_of_modes(device: torch.device) -> Iterator[None]:
    """The same where a mode is on."""
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(mode=False))
        modes.enter_context(torch.no_grad())
        if torch._C._is_any_autocast_enabled():
            modes.enter_context(torch.autocast(device.type, enabled=False))
        yield


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Lets what is inside compute in the dtypes that it is given, on a device and on the CPU."""
    return _without_autocast(device) if torch._C._is_any_autocast_enabled() else nullcontext()


@contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    """The same where autocast is on."""
    with torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
        yield
