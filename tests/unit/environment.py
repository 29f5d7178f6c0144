"""What the environment says of the tests: where tensors are made, and in which dtype."""

import os
from collections.abc import Callable

import torch

DTYPE: torch.dtype = getattr(torch, os.environ.get("AUTOGRAM_TEST_DTYPE", "float64"))
DEVICE = os.environ.get("AUTOGRAM_TEST_DEVICE", "cpu")

# Whether a kernel that runs again gives the same bits: some kernels of a GPU add up in any order.
ADDS_UP_IN_ORDER = DEVICE == "cpu" or torch.version.cuda is None  # else a device is pretended

# Where other kernels run, or it does not: how many units in the last place, of the largest element,
# results may be apart.
LAST_BITS = 16


def device_of_threads() -> Callable[[], None]:
    """A function that a thread calls, so that it makes tensors where this one does by default."""
    device = torch.get_default_device()
    return lambda: None if device.type == "cpu" else torch.set_default_device(device)
