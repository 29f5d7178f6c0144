"""Memory of a CPU that contractions write to again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Literal

import torch
from torch import Tensor

from autogram._undo import undone

# What scratch memory is for: rows that are read once, a copy of the first or of the second operand
# of a product, or a copy of a factor for several products.
Purpose = Literal["rows", "first", "second", "factor"]

# Gives memory for a tensor of some shape, like another one.
Memory = Callable[[Sequence[int], Tensor], Tensor]

_ALIGNMENT = 64


class Workspace:
    """Memory for each thread, which is freed with the engine.

    Fresh memory is slow: the system clears each page when it is touched for the first time.
    """

    def __init__(self) -> None:
        self.free()

    def free(self) -> None:
        """Frees the memory of all threads."""
        self._own = _OfThread()

    @property
    def arena(self) -> Arena:
        """This thread's memory for rows that a step keeps until its end."""
        return self._own.arena

    def scratch(self, shape: Sequence[int], like: Tensor, purpose: Purpose) -> Tensor:
        """A contiguous tensor, valid until memory for the same purpose is requested again."""
        elements, own = prod(shape), self._own.scratch
        memory = own.get((purpose, like.dtype))
        if memory is None or memory.numel() < elements:
            memory = own[purpose, like.dtype] = like.new_empty(elements)
        return memory[:elements].view(tuple(shape))


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.arena = Arena()
        self.scratch: dict[tuple[Purpose, torch.dtype], Tensor] = {}


class Arena:
    """Memory that is handed out piece by piece, and taken back as a whole.

    For the next step, the arena keeps as much memory as the last step requested. Tensors that do
    not fit come from PyTorch.
    """

    def __init__(self) -> None:
        self._is_borrowed = False
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._taken = 0

    @contextmanager
    def borrowed(self) -> Iterator[Arena | None]:
        """The arena for a step, or ``None`` inside another step.

        Do not use its tensors after the block.
        """
        if self._is_borrowed:
            yield None
            return
        with undone(partial(setattr, self, "_is_borrowed", False)):
            self._is_borrowed = True
            if not self._taken <= len(self._memory) <= 2 * self._taken:
                self._memory = self._memory.new_empty(0)  # frees it before the new one is there
                self._memory = self._memory.new_empty(self._taken)
            self._taken = 0
            yield self

    def restart(self) -> None:
        """Takes everything back: the step begins again."""
        self._taken = 0

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A contiguous tensor with undefined content, of the dtype and device of ``like``."""
        if like.device.type != "cpu":
            return like.new_empty(shape)
        start = -(-self._taken // _ALIGNMENT) * _ALIGNMENT
        self._taken = start + prod(shape) * like.dtype.itemsize
        if self._taken > len(self._memory):
            return like.new_empty(shape)
        # Not a view: all views of one tensor count their changes together. Without strides, PyTorch
        # uses those of a contiguous tensor.
        offset = start // like.dtype.itemsize
        return like.new_empty(0).set_(self._memory.untyped_storage(), offset, tuple(shape), ())
