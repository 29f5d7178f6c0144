"""Fixtures of all unit tests."""

import gc
import os
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from autogram._blocks import reserve, settled
from autogram._blocks.program import Program
from autogram._blocks.tracer import Tracer

DTYPE = getattr(torch, os.environ.get("AUTOGRAM_TEST_DTYPE", "float64"))
DEVICE = os.environ.get("AUTOGRAM_TEST_DEVICE", "cpu")


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
def default_device() -> Iterator[None]:
    """Make tensors on the device of the environment, the CPU unless it says otherwise."""
    before = torch.get_default_device()
    if torch.device(DEVICE) != before:
        torch.set_default_device(DEVICE)
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


@pytest.fixture(autouse=True)
def reused_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the memory of small gradients again, too."""
    monkeypatch.setattr(reserve, "_LARGE", 0)


def no_memory(shape: Sequence[int], like: Tensor) -> None:
    """Memory that is used up."""
    del shape, like


@pytest.fixture(autouse=True)
def checked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settle contractions at once, and compare what was traced with what was computed."""
    settled._MEMOS.clear()
    monkeypatch.setattr(settled, "_WORTH_A_TRACE", 1)
    trace = Tracer.program

    def checked(tracer: Tracer, result: Tensor) -> Program | None:
        program = trace(tracer, result)
        if program is not None:
            inputs = [x if isinstance(x, Tensor) else no_memory for x in tracer._inputs]
            again = program(inputs)
            torch.testing.assert_close(again, result, rtol=0, atol=0, equal_nan=True)
        return program

    monkeypatch.setattr(Tracer, "program", checked)
