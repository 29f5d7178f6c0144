"""Arenas: memory for what a step keeps until its end, used again by the next step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from autogram._blocks.region import contiguous_strides

_ALIGNMENT = 64


class Arena:
    """Memory of a CPU that is handed out piece by piece, and taken back as a whole.

    What is free at the end of a step, the C library gives back to the system, and touching it for
    the first time in the next step takes longer than computing what is written there. As much as
    was asked for in the last step is kept for the next one; what does not fit comes from PyTorch.
    """

    def __init__(self) -> None:
        self._is_borrowed = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._taken = self._wanted = 0

    @contextmanager
    def borrowed(self) -> Iterator[Arena | None]:
        """The arena for a step, or ``None`` if another step, in this thread or one beside, has it.

        Nothing that was taken may be used behind the block.
        """
        if not self._is_borrowed.acquire(blocking=False):
            yield None
            return
        try:
            if not self._wanted <= len(self._memory) <= 2 * self._wanted:
                self._memory = self._memory.new_empty(0)  # frees it before the new one is there
                self._memory = self._memory.new_empty(self._wanted)
            self._taken = self._wanted = 0
            yield self
        finally:
            self._is_borrowed.release()

    def restart(self) -> None:
        """Takes everything back: the step begins again."""
        self._taken = self._wanted = 0

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """Memory whose content is undefined.

        Args:
            shape: The shape of the tensor to write there.
            like: A tensor on the same device and of the same dtype.

        Returns:
            A contiguous tensor, or ``None`` if there is not enough left, or it is not for a CPU.
        """
        if like.device.type != "cpu":
            return None
        start = -(-self._taken // _ALIGNMENT) * _ALIGNMENT
        self._taken = start + prod(shape) * like.dtype.itemsize
        self._wanted = max(self._wanted, self._taken)
        if self._taken > len(self._memory):
            return None
        # Not a view: all views count their changes together, and a change of one part is none of
        # another.
        storage, offset = self._memory.untyped_storage(), start // like.dtype.itemsize
        return like.new_empty(0).set_(
            storage, offset, tuple(shape), contiguous_strides(tuple(shape))
        )
