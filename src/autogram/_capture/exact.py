"""Where Gramians and other products are computed: no graph, no autocast, no inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Lets nothing inside be a part of a graph, and all be exact whatever the user's modes.

    Each mode is left only where it is on, as to leave one takes longer than a small product. In
    inference mode, tensors would not count their changes in place.

    Args:
        device: That of the losses.
    """
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(mode=False))
        modes.enter_context(torch.no_grad())
        if torch._C._is_any_autocast_enabled():
            modes.enter_context(torch.autocast(device.type, enabled=False))
        yield
