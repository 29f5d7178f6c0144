"""Matrix products, by whichever library multiplies faster on this machine."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# From this many multiply-adds on, oneDNN is faster: a call of it takes 17 us, one of MKL 2 us.
_WORTH_A_CALL = 2**21

# With fewer rows or columns than this, a product is bound by memory, in which MKL is no slower.
_THIN = 16

# oneDNN wants one side contiguous. A transposing copy costs as much as it gains on so many rows.
_WORTH_A_COPY = 512


def is_large(like: Tensor, rows: int, summed: int, columns: int) -> bool:
    """Whether :func:`multiply` may be faster than PyTorch's own product of matrices of some size.

    Args:
        like: A tensor on the same device and of the same dtype.
        rows: Rows of the product.
        summed: The length of the sums.
        columns: Columns of the product.
    """
    return (
        rows * summed * columns >= _WORTH_A_CALL
        and min(rows, summed, columns) >= _THIN
        and like.dtype == torch.float32
        and like.device.type == "cpu"
        and _has_faster_kernels()
        and bool(torch.backends.mkldnn.enabled)
    )


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right.mT`` for two matrices."""
    rows, summed = left.shape
    if not is_large(left, rows, summed, len(right)):
        return left @ right.mT
    if left.is_contiguous() or (len(right) >= _WORTH_A_COPY and not right.is_contiguous()):
        return _linear(left, right)
    if right.is_contiguous() or len(left) >= _WORTH_A_COPY:
        return _linear(right, left).mT
    return left @ right.mT


def _linear(input: Tensor, weight: Tensor) -> Tensor:
    """``input @ weight.mT`` by oneDNN."""
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.contiguous()  # for others, it has nothing but its reference loops
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, None, "none", [], "")
    return product


@cache
def _has_faster_kernels() -> bool:
    """Whether oneDNN has kernels that MKL, which PyTorch calls for matrix products, has not.

    MKL takes its AVX-512 kernels on processors of Intel alone. On an AMD EPYC of two cores, it does
    150 to 190 GFLOP/s, and oneDNN 330 to 440. PyTorch calls oneDNN for convolutions, and for linear
    layers in compiled code, whose operator this is.
    """
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and "GenuineIntel" not in _processor()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _processor() -> str:
    """What the system says of the processor, with the name of its vendor."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
