"""What the environment says of the tests: where tensors are made, and in which dtype."""

import os

import torch

DTYPE: torch.dtype = getattr(torch, os.environ.get("AUTOGRAM_TEST_DTYPE", "float64"))
DEVICE = os.environ.get("AUTOGRAM_TEST_DEVICE", "cpu")


def use_device() -> None:
    """Makes tensors of this thread on the device: PyTorch's default is that of a thread."""
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)
