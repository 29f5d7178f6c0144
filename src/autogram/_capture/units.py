"""Units: modules that `fully_shard` was called with, and tensors that are spread over processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import Tensor, nn


def sharded_units(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside of a module that were given to `fully_shard`."""
    return (inner for inner in module.modules() if is_unit(inner))


def is_unit(module: nn.Module) -> bool:
    """Whether a module was given to `fully_shard`. Known by name, as PyTorch may lack the class."""
    return any(
        of.__name__ == "FSDPModule" and of.__module__.startswith("torch.distributed.")
        for of in type(module).__mro__
    )


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes."""
    module = sys.modules.get("torch.distributed.tensor")  # else there can be none
    return module is not None and isinstance(tensor, module.DTensor)
