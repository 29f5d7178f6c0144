"""Scratch: memory for rows, and for copies of factors, that are read once and dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from autogram._blocks.region import contiguous_strides

# From 32 MiB on, the C library takes memory from the system for every tensor anew, and touching it
# for the first time is slower than the arithmetic: rows of 150 MB took twice the time in one piece.
# On a CPU, rows are cut into pieces of this size, which are written into the same memory one after
# the other. Of the sizes from 8 to 128 MiB, this is the smallest that is as fast as the best.
CPU_BYTES = 2**26

# What it is for: the result of a product, a copy of one of its operands, or a copy of a factor for
# several products.
Purpose = Literal["result", "first", "second", "whole"]

# Gives memory for a tensor of some shape, like another one, or `None` if it has none.
Memory = Callable[[Sequence[int], Tensor], Tensor | None]


def allocate(memory: Memory, shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory whose content is undefined, from PyTorch where there is none.

    Modes see this as one call, so that programs ask anew each time.

    Args:
        memory: Where to look for it.
        shape: The shape of the tensor to write there.
        like: A tensor on the same device and of the same dtype.

    Returns:
        A contiguous tensor.
    """
    if has_torch_function_unary(like):
        found: Tensor = handle_torch_function(allocate, (like,), memory, shape, like)
        return found
    piece = memory(shape, like)
    return like.new_empty(shape) if piece is None else piece


@cache
def scratch(purpose: Purpose) -> Memory:
    """Memory that is valid until it is asked for again, for the same purpose in the same thread.

    It has none for more than ``CPU_BYTES``, and for other devices than a CPU.
    """
    return partial(_take, purpose)


def fits(shape: Sequence[int], like: Tensor) -> bool:
    """Whether :func:`scratch` has memory for a tensor of some shape, like another one."""
    return like.device.type == "cpu" and prod(shape) * like.dtype.itemsize <= CPU_BYTES


class _Kept(threading.local):
    """One piece of memory for each thread and purpose, kept between calls, by dtype."""

    def __init__(self) -> None:
        self.memory: dict[tuple[Purpose, torch.dtype], Tensor] = {}


_KEPT = _Kept()


def _take(purpose: Purpose, shape: Sequence[int], like: Tensor) -> Tensor | None:
    """A part of the memory for a purpose."""
    if not fits(shape, like):
        return None
    memory = _KEPT.memory.get((purpose, like.dtype))
    if memory is None:
        whole = _KEPT.memory.get((purpose, torch.uint8))
        if whole is None:
            whole = torch.empty(CPU_BYTES, dtype=torch.uint8, device="cpu")
            _KEPT.memory[purpose, torch.uint8] = whole
        memory = _KEPT.memory[purpose, like.dtype] = whole.view(like.dtype)
    return memory.as_strided(shape, contiguous_strides(tuple(shape)))
