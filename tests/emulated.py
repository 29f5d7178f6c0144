"""A plugin of pytest that lets engines compute as on a GPU, on a machine without one.

``pytest -p tests.emulated`` contracts with the kernels of a GPU, whose products refuse operands of
two dtypes, and has autocast compute in float32 what it does on a GPU. So it finds what a GPU would
refuse. The time of steps says nothing then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Devices
from autogram._blocks.kernels import cuda
from tests.speed.gpu.autocast import autocast_as_on_a_gpu

_FREE, _TAKEN, _PROCESSORS = 2**36, 2**31, 132
_ENTERED = ExitStack()  # never closed


def _product(plain: Callable[..., Tensor], x: Tensor, y: Tensor, **options: Any) -> Tensor:
    """A product of matrices as a GPU has it."""
    wide = options.pop("out_dtype", None)
    if x.dtype != y.dtype:
        raise RuntimeError(f"Operands of {x.dtype} and {y.dtype} cannot be multiplied on a GPU.")
    if wide is None:
        return plain(x, y, **options)
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"A GPU multiplies operands of {x.dtype} in their own dtype.")
    return plain(x.to(wide), y.to(wide))


class _Torch(SimpleNamespace):
    """PyTorch, with products as on a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def pytest_configure() -> None:
    """Replaces what asks for a GPU, for the whole run."""
    products = {name: partial(_product, getattr(torch, name)) for name in ("mm", "bmm")}
    for owner, name, value in (
        (Devices, "on", lambda devices, _device: devices.cuda),
        (cuda, "_bytes", lambda _device: (_FREE, _TAKEN)),
        (cuda, "_processors", lambda _device: _PROCESSORS),
        (cuda, "_can_accumulate", lambda *_: True),
        (cuda, "torch", _Torch(**products)),
    ):
        setattr(owner, name, value)
    _ENTERED.enter_context(autocast_as_on_a_gpu())
