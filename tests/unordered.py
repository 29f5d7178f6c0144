"""A plugin of pytest: kernels that add up in any order on a GPU do so on a CPU, too.

``pytest -p tests.unordered`` so finds where a result, or the time that it takes, depends on
gradients that are the same bit for bit in each pass. The operators are some of those that
``torch.use_deterministic_algorithms`` lists for CUDA, and attention.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.unit import environment

OPERATORS = [
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "_embedding_bag_dense_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "adaptive_max_pool2d_backward",
    "avg_pool3d_backward",
    "convolution_backward",
    "cumsum",
    "embedding_dense_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "index_add",
    "max_pool3d_with_indices_backward",
    "reflection_pad2d_backward",
    "replication_pad2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_nearest2d_backward",
]

_LIBRARY = torch.library.Library("aten", "IMPL")
_GENERATOR = torch.Generator("cpu").manual_seed(0)  # that of the tests draws what it would


def _rounded(value: Any) -> Any:
    """Changes some elements of a new tensor by one unit in the last place."""
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        with torch.no_grad():
            drawn = torch.randint(-8, 9, value.shape, generator=_GENERATOR, device="cpu")
            steps = drawn.div(8, rounding_mode="trunc").to(value.dtype)
            value.mul_(1 + torch.finfo(value.dtype).eps * steps)
    return value


def _unordered(operator: Any) -> Callable[..., Any]:
    """What takes the place of an operator on a CPU: its kernel, and other last bits."""
    kernel = torch.library.get_kernel(operator, "CPU")

    def compute(keys: Any, *args: Any, **kwargs: Any) -> Any:
        found = kernel.call_boxed(keys, *args, **kwargs)
        return tuple(map(_rounded, found)) if isinstance(found, tuple) else _rounded(found)

    return compute


def pytest_configure() -> None:
    """Registers them for the whole run."""
    environment.ADDS_UP_IN_ORDER = False
    environment.LAST_BITS = 64  # forward passes have others, too, and gradients of them may cancel
    with warnings.catch_warnings(action="ignore"):  # of kernels that are overridden
        for name in OPERATORS:
            operator = getattr(torch.ops.aten, name).default
            _LIBRARY.impl(operator, _unordered(operator), "CPU", with_keyset=True)
