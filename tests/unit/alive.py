"""What is alive, found through everything that the garbage collector tracks."""

import gc

import torch
from torch import Tensor, nn


def live_tensors() -> int:
    """How many tensors."""
    return len(_tensors())


def live_bytes() -> int:
    """How large the storages of all tensors on CPUs are together, each counted once."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # which has no storage
    plain = [x for x in _tensors() if type(x) in (Tensor, nn.Parameter) and not is_wrapped(x)]
    storages = [x.untyped_storage() for x in plain if x.device.type == "cpu"]
    return sum({x._cdata: x.nbytes() for x in storages}.values())


def live_objects() -> int:
    """How many objects of the library's classes."""
    return sum(str(type(x).__module__).startswith("autogram") for x in gc.get_objects())


def _tensors() -> list[Tensor]:
    return [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
