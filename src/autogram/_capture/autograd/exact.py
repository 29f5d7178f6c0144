"""Where Gramians and other products are computed: no graph, no autocast, no inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Lets nothing inside be a part of a graph, and all be exact whatever the user's modes.

    Args:
        device: That of the losses.
    """
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():  # in which tensors do not count changes in place
            modes.enter_context(torch.inference_mode(mode=False))
        modes.enter_context(torch.no_grad())
        modes.enter_context(without_autocast(device))
        yield


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Lets what is inside compute in the dtypes that it is given, on a device and on the CPU."""
    with ExitStack() as modes:
        if torch._C._is_any_autocast_enabled():
            for kind in {device.type, "cpu"}:
                modes.enter_context(torch.autocast(kind, enabled=False))
        yield
