"""Where Gramians and other products are computed: no graph, no autocast, no inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Lets nothing inside be a part of a graph, and all be exact whatever the user's modes."""
    # In inference mode, tensors do not count changes in place.
    with torch.inference_mode(mode=False), torch.no_grad(), without_autocast(device):
        yield


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Lets what is inside compute in the dtypes that it is given, on a device and on the CPU."""
    if not torch._C._is_any_autocast_enabled():
        yield
        return
    with torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
        yield
