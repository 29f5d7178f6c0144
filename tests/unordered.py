"""A plugin of pytest: kernels that add up in any order on a GPU do so on a CPU, too.

``pytest -p tests.unordered`` so finds where a result, or the time that it takes, depends on
gradients that are the same bit for bit in each pass. The operators are some of those that
``torch.use_deterministic_algorithms`` lists for CUDA, and attention.
"""

from typing import Any

import torch
from torch import Tensor

from tests.overrides import change_last_bits
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

_GENERATOR = torch.Generator("cpu").manual_seed(0)  # that of the tests draws what it would


def _steps(name: str, args: tuple[Any, ...], value: Tensor) -> Tensor:
    """Moves some elements by one unit in the last place."""
    del name, args
    drawn = torch.randint(-8, 9, value.shape, generator=_GENERATOR, device="cpu")
    return drawn.div(8, rounding_mode="trunc")


def pytest_configure() -> None:
    """Registers them for the whole run."""
    environment.ADDS_UP_IN_ORDER = False
    environment.LAST_BITS = 64  # forward passes have others, too, and gradients of them may cancel
    change_last_bits(OPERATORS, _steps)
