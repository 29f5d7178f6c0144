"""A plugin of pytest: kernels whose last bits depend on the sizes and strides of their operands.

A kernel computes whole vectors of elements by other instructions than the elements that are left
over. Which elements these are depends on sizes, strides and the processor. So two results that are
computed in different ways may have equal bits on one processor, and others on the next.
``pytest -p tests.arranged`` finds tests that ask for equal bits there, on any processor.
"""

import zlib
from typing import Any

import torch
from torch import Tensor

from tests.overrides import change_last_bits

# Sums, in whatever order, and functions that no kernel rounds correctly.
ELEMENTWISE = [
    "atan2",
    "cos",
    "erf",
    "exp",
    "expm1",
    "hypot",
    "lerp.Tensor",
    "log",
    "log1p",
    "logaddexp",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "sigmoid",
    "sin",
    "special_xlog1py",
    "tanh",
]
OTHERS = [
    "_log_softmax",
    "_log_softmax_backward_data",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_softmax",
    "_softmax_backward_data",
    "addmm",
    "baddbmm",
    "bmm",
    "convolution",
    "convolution_backward",
    "cumsum",
    "dot",
    "gelu",
    "gelu_backward",
    "linalg_vector_norm",
    "mean.dim",
    "mm",
    "mv",
    "native_batch_norm",
    "native_group_norm",
    "native_group_norm_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "silu",
    "silu_backward",
    "sum",
    "sum.dim_IntList",
]


def steps(name: str, args: tuple[Any, ...], value: Tensor) -> Tensor:
    """How a result moves: this follows from the operator and the arrangement of its operands.

    Multiples of a quarter stay: they are likely to be exact, which they are with every kernel. So
    do results in half precision, which are rounded from more digits and seldom differ.
    """
    operands = [x for x in args if isinstance(x, Tensor)]
    if name in ELEMENTWISE:  # PyTorch expands the operands itself
        operands = list(torch.broadcast_tensors(*operands))
    key = repr((name, *map(_arrangement, operands)))
    first = zlib.crc32(key.encode()) % 1009
    places = torch.arange(value.numel(), device="cpu").view(value.shape)
    drawn = (places + first).square() % 1009 % 3 - 1  # within vmap, nothing may be drawn
    if value.dtype in (torch.bfloat16, torch.float16):
        return torch.zeros_like(drawn)
    return drawn.masked_fill((4 * value).frac() == 0, 0)


def _arrangement(x: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides. The stride of a dimension of size one has no meaning."""
    return [(n, stride if n > 1 else 0) for n, stride in zip(x.shape, x.stride(), strict=True)]


def pytest_configure() -> None:
    """Registers them for the whole run."""
    change_last_bits([*ELEMENTWISE, *OTHERS], steps)
