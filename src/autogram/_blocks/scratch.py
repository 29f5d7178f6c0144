"""Scratch: memory for rows that are read once and dropped."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# From 32 MiB on, the C library takes memory from the system for every tensor anew, and touching it
# for the first time is slower than the arithmetic: rows of 150 MB took twice the time in one piece.
# Rows are cut into pieces of this size on a CPU, and written into the same memory one after the
# other, which took four fifths of the time even where a piece is smaller.
CPU_BYTES = 2**24


class _Scratch(threading.local):
    """One piece of memory for each thread, kept between calls."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None


_SCRATCH = _Scratch()


def scratch(elements: int, dtype: torch.dtype) -> Tensor | None:
    """Memory on the CPU whose content is undefined, valid until the next call in this thread.

    Returns:
        A vector with as many elements, or ``None`` if that is more than is kept.
    """
    if elements * dtype.itemsize > CPU_BYTES:
        return None
    if _SCRATCH.memory is None:
        _SCRATCH.memory = torch.empty(CPU_BYTES, dtype=torch.uint8)
    return _SCRATCH.memory[: elements * dtype.itemsize].view(dtype)
