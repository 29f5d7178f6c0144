"""Autocast on a CPU that computes what a GPU's computes in float32 in float32, too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Those of a GPU's list of functions that the models here call, and that a CPU's list leaves out.
_WIDE = ("layer_norm", "group_norm", "softmax.int", "log_softmax.int", "exp", "pow.Tensor_Scalar")


@contextmanager
def autocast_as_on_a_gpu() -> Iterator[None]:
    """Lets autocast normalise, exponentiate and take powers in float32 in a block.

    The input of the next layer is in float32 then, and only the layer itself rounds it.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in _WIDE:
            packet, _, overload = name.partition(".")
            function = getattr(getattr(torch.ops.aten, packet), overload or "default")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that an operator is overridden
                library.impl(name, partial(_in_float32, function), "AutocastCPU")
        yield


def _in_float32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call with wide arguments, without autocast."""
    with torch.autocast("cpu", enabled=False):
        return function(*map(_widened, args), **{k: _widened(v) for k, v in kwargs.items()})


def _widened(value: Any) -> Any:
    """Tensors in half precision in float32."""
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
