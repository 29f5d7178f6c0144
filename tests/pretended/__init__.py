"""A plugin of pytest that gives PyTorch two CUDA devices, on a machine without one.

``pytest -p tests.pretended`` makes tensors on the first of them, whose memory is the CPU's. So all
that is decided by the device is decided as on a GPU: kernels, autocast, the thread and the stream
of each node of a backward pass. Operands on two devices are refused. What a GPU computes by kernels
of its own, as recurrent layers and attention, is computed as on a CPU, and nothing waits.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_LIBRARY = Path(__file__).parents[2] / "build" / "pretended.so"

ctypes.CDLL(str(_LIBRARY))  # before PyTorch, which looks for CUDA when it is imported
os.environ["AUTOGRAM_TEST_DEVICE"] = "cuda"

import torch  # noqa: E402
from torch import Tensor, UntypedStorage  # noqa: E402

_FREE, _TAKEN = 2**36, 2**31
_PROPERTIES = SimpleNamespace(
    name="pretended", multi_processor_count=132, major=9, minor=0, total_memory=_FREE + _TAKEN
)
_to = UntypedStorage.to


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """A tensor of all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone(storage: UntypedStorage) -> UntypedStorage:
    """A copy of a storage, on its device."""
    return _bytes_of(storage).clone().untyped_storage()


def _moved(storage: UntypedStorage, *, device: Any, non_blocking: bool = False) -> UntypedStorage:
    """A storage on another device."""
    if torch.device(device).type != "cuda":
        return _to(storage, device=device, non_blocking=non_blocking)
    return _bytes_of(storage).to(device).untyped_storage()


def _exchanged(index: int) -> int:
    """Makes a device the current one, and returns the one before; nothing for a negative index."""
    before = torch.accelerator.current_device_index()
    if index >= 0:
        torch.accelerator.set_device_index(index)
    return before


def pytest_configure() -> None:
    """Replaces what asks a driver, for the whole run."""
    statistics = {"allocated_bytes": {"all": {"current": _TAKEN}}}
    for name, value in {
        "_lazy_init": None,
        "is_available": True,
        "is_initialized": True,
        "device_count": 2,
        "synchronize": None,
        "_sleep": None,
        "is_current_stream_capturing": False,
        "get_device_properties": _PROPERTIES,
        "get_device_capability": (9, 0),
        "mem_get_info": (_FREE, _FREE + _TAKEN),
        "memory_stats_as_nested_dict": statistics,
    }.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
        if hasattr(torch.cuda.random, name):  # which has imported some
            setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    # Functions of their own: Dynamo tells them from those that they call.
    torch._C._cuda_getDevice = lambda: torch.accelerator.current_device_index()
    torch.cuda.set_device = lambda device: torch.accelerator.set_device_index(device)
    torch.cuda.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    torch.cuda._exchange_device = lambda index: _exchanged(index)
    torch.cuda._maybe_exchange_device = lambda index: _exchanged(index)
    torch.cuda.default_generators = tuple(torch.Generator(f"cuda:{i}") for i in range(2))
    torch.cuda._initialized = True
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.backends.cudnn.is_acceptable = lambda *_: False
    UntypedStorage.clone, UntypedStorage.to = _clone, _moved
