"""Scratch: memory for rows, and for copies of factors, that are read once and dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

# From 32 MiB on, the C library takes memory from the system for every tensor anew, and touching it
# for the first time is slower than the arithmetic: rows of 150 MB took twice the time in one piece.
# On a CPU, rows are cut into pieces of this size, which are written into the same memory one after
# the other. Of the sizes from 8 to 128 MiB, this is the smallest that is as fast as the best.
CPU_BYTES = 2**26

Purpose = Literal["result", "first", "second", "whole"]

# Gives memory for a tensor of some shape, like another one, or `None` if it has none.
Memory = Callable[[Sequence[int], Tensor], Tensor | None]


class _Scratch(threading.local):
    """One piece of memory for each thread and purpose, kept between calls."""

    def __init__(self) -> None:
        self.memory: dict[Purpose, Tensor] = {}


_SCRATCH = _Scratch()


def scratch(purpose: Purpose, shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Memory whose content is undefined, valid until the next call for its purpose in this thread.

    Args:
        purpose: What it is for: the result of a product, a copy of one of its operands, or a copy
            of a factor for several products.
        shape: The shape of the tensor to write there.
        like: A tensor on the same device and of the same dtype.

    Returns:
        A contiguous tensor, or ``None`` if it is larger than what is kept, or not on a CPU.
    """
    elements, dtype = prod(shape), like.dtype
    if like.device.type != "cpu" or elements * dtype.itemsize > CPU_BYTES:
        return None
    memory = _SCRATCH.memory.get(purpose)
    if memory is None:
        memory = _SCRATCH.memory[purpose] = torch.empty(CPU_BYTES, dtype=torch.uint8, device="cpu")
    return memory[: elements * dtype.itemsize].view(dtype).view(shape)
