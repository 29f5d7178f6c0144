"""Matrix products by oneDNN, on processors for which it has kernels and MKL has none.

MKL takes its AVX-512 kernels on processors of Intel alone. On an AMD EPYC of two cores, it does 150
to 190 GFLOP/s, and oneDNN 330 to 440. PyTorch calls MKL for products of matrices, and oneDNN for
convolutions, and for linear layers in code that it compiles. The functions here do so for products.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from autogram._blocks.scratch import Memory, allocate

# From this many multiply-adds on, oneDNN is faster: a call of it takes 20 to 50 us, one of MKL 2.
_WORTH_A_CALL = 2**23

# With fewer rows or columns than this, a product must be larger to be worth a call, as it waits for
# memory. A batch of thin products, MKL does one by one.
_THIN = 32
_WORTH_A_THIN_CALL = 2**24
_THINNEST = 8
_THIN_IN_BATCH = 16

# With sums as long as this, oneDNN takes three times as long as with those that are one shorter.
_TOO_LONG = 2**19

# oneDNN wants one side contiguous. Alone, a transposing copy costs as much as it gains on 512 rows;
# in a step, where it waits for memory, there the products by MKL took 4 to 8 % less.
_WORTH_A_COPY = 1024

# Where a group has a multiple of so many channels on both sides, oneDNN brings them into blocks
# first, which takes longer than the product.
_BLOCK = 16


def is_faster(like: Tensor, batch: int, rows: int, summed: int, columns: int) -> bool:
    """Whether a batch of products is worth a call of :func:`multiply` or :func:`multiply_batch`.

    Args:
        like: A tensor on the same device and of the same dtype.
        batch: The number of products.
        rows: Rows of a product.
        summed: The length of its sums.
        columns: Columns of a product.
    """
    work = batch * rows * summed * columns
    return (
        work >= _WORTH_A_CALL
        and summed < _TOO_LONG
        and _is_thick(batch, rows, summed, columns, work)
        and like.dtype == torch.float32
        and like.device.type == "cpu"
        and _has_kernels()
        and bool(torch.backends.mkldnn.enabled)
    )


def _is_thick(batch: int, rows: int, summed: int, columns: int, work: int) -> bool:
    """Whether products have enough rows and columns, and sums are long enough."""
    if batch > 1:
        return min(rows, summed, columns) >= _THIN_IN_BATCH
    thinnest = _THINNEST if work >= _WORTH_A_THIN_CALL else _THIN
    return summed >= _THIN and min(rows, columns) >= thinnest


def multiply(left: Tensor, right: Tensor, memory: Memory | None = None) -> Tensor:
    """``left @ right.mT`` for two matrices, by whatever is faster.

    Args:
        left: ``(rows, summed)``.
        right: ``(columns, summed)``.
        memory: Where to put it. What oneDNN computes is elsewhere.
    """
    rows, summed = left.shape
    if not is_faster(left, 1, rows, summed, len(right)):
        return _plain(left, right, memory)
    if left.is_contiguous() or (len(right) >= _WORTH_A_COPY and not right.is_contiguous()):
        return _linear(left, right)
    if right.is_contiguous() or len(left) >= _WORTH_A_COPY:
        return _linear(right, left).mT
    return _plain(left, right, memory)


def zeros_behind(rows: int, summed: int) -> int:
    """How many zeros behind each sum's factors make :func:`multiply_batch` fast."""
    return int(rows % _BLOCK == 0 and summed % _BLOCK == 0)


def multiply_batch(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` for batches of matrices, as a convolution with a group for each.

    Args:
        left: ``(n, rows, summed)``, contiguous.
        right: ``(n, summed, columns)``, contiguous.

    Returns:
        ``(n, rows, columns)``.
    """
    n, rows, summed = left.shape
    signal = right.view(1, n * summed, right.shape[2])
    product = torch.conv1d(signal, left.view(n * rows, summed, 1), groups=n)
    return product.view(n, rows, right.shape[2])


def _plain(left: Tensor, right: Tensor, memory: Memory | None) -> Tensor:
    """``left @ right.mT`` by MKL, transposing only what is transposed."""
    if memory is not None:
        out = allocate(memory, (len(left), len(right)), left)
        return torch.mm(left, right.mT, out=out)
    return linear(left, right) if right.is_contiguous() else torch.mm(left, right.mT)


def _linear(input: Tensor, weight: Tensor) -> Tensor:
    """``input @ weight.mT`` by oneDNN."""
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.contiguous()  # for others, it has nothing but its reference loops
    input = input.contiguous()  # it would do so itself, and took up to 15 % longer for it all
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, None, "none", [], "")
    return product


@cache
def _has_kernels() -> bool:
    """Whether oneDNN has kernels for this processor that MKL has not."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "GenuineIntel" not in _processor()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _processor() -> str:
    """What the system says of the processor, with the name of its vendor."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
