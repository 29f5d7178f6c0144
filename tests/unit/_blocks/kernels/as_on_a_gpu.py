"""Contractions as on a GPU, for tests of the folders beside `_blocks`."""

import pytest

from autogram._blocks import Devices
from autogram._blocks.kernels import cuda


def contract_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, processors: int = 3) -> None:
    """Lets engines contract tensors of each device as those of a GPU with some processors."""
    monkeypatch.setattr(Devices, "on", lambda devices, _device: devices.cuda)
    monkeypatch.setattr(cuda, "_processors", lambda _device: processors)
