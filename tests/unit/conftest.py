"""Fixtures of all unit tests."""

import gc
import getpass
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests.unit.environment import DEVICE, DTYPE

if DEVICE != "cpu":  # also for tensors that modules of tests make when they are imported
    torch.set_default_device(DEVICE)
    torch.backends.cudnn.allow_tf32 = False  # by default, convolutions would keep ten bits


if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # Inductor would take from its cache what it has compiled for another capability.
    folder = f"torchinductor_{getpass.getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), folder))


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Give every test the same random numbers, and restore the generator after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Make tensors in the dtype of the environment, float64 unless it says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make tensors on the device of the environment, the CPU unless it says otherwise."""
    before = torch.get_default_device()
    device = "cpu" if request.node.get_closest_marker("cpu") else DEVICE
    if torch.device(device) != before:
        torch.set_default_device(None if device == "cpu" else device)
    yield
    if torch.get_default_device() != before:
        torch.set_default_device(before)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Let reference counts alone free memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
