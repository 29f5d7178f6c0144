"""Reserves: memory of gradients, which is used again once nobody holds it any more."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod

import torch
from torch import Tensor

from autogram._blocks.region import contiguous_strides
from autogram._blocks.scratch import Memory

# From this many bytes on, the C library may give memory back to the system when it is free.
_LARGE = 2**17

_count_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

Kind = tuple[tuple[int, ...], torch.dtype]


class Reserve:
    """Memory of a CPU for tensors that others hold for as long as they like.

    Gradients live from one step into the next, where the optimizer or the user drops them, and the
    next ones are as large. Of memory that is free in between, the C library gives much back to the
    system; touching it again for the first time takes as long as computing a gradient. So what was
    handed out in a step is kept until the next one, and handed out again if all tensors in it are
    gone by then.
    """

    def __init__(self) -> None:
        self._is_borrowed = threading.Lock()
        self._room = 0
        self._kept: dict[Kind, list[Tensor]] = {}
        self._before: dict[Kind, list[Tensor]] = {}

    @contextmanager
    def borrowed(self, limit: int) -> Iterator[Memory | None]:
        """Memory for a step, or ``None`` if another step has it, in this thread or one beside.

        Args:
            limit: The number of elements that may be kept.
        """
        if not self._is_borrowed.acquire(blocking=False):
            yield None
            return
        try:
            self._before, self._kept, self._room = self._kept, {}, limit
            yield self._take
        finally:
            self._before = {}
            self._is_borrowed.release()

    def _take(self, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """A contiguous tensor whose content is undefined, and whose memory nobody else has.

        It is ``None`` where nothing is kept: for small tensors, and for those on other devices.
        """
        elements = prod(shape)
        is_large = elements * like.dtype.itemsize >= _LARGE
        if not is_large or like.device.type != "cpu" or elements > self._room or not _count_uses:
            return None
        kind = tuple(shape), like.dtype
        memory = self._unused(kind)
        if memory is None:
            memory = like.new_empty(shape)
        self._room -= elements
        self._kept.setdefault(kind, []).append(memory)
        # Not a view: what is done to it, such as to change its shape, is not done to this one.
        return like.new_empty(0).set_(
            memory.untyped_storage(), 0, kind[0], contiguous_strides(kind[0])
        )

    def _unused(self, kind: Kind) -> Tensor | None:
        """What was handed out in the last step, if nobody holds it any more."""
        found = self._before.get(kind, [])
        while found:
            memory = found.pop()
            if _is_unused(memory):
                return memory
        return None


def _is_unused(memory: Tensor) -> bool:
    """Whether nobody else has the storage of a tensor, and it is as it was."""
    storage = memory.untyped_storage()
    is_as_it_was = storage.nbytes() == memory.nbytes and not storage.is_shared()
    del storage
    return is_as_it_was and _uses(memory) == _uses_if_unused()


def _uses(memory: Tensor) -> tuple[int, int]:
    """How often a tensor's storage is in use: by tensors, and as an object of its own."""
    assert _count_uses is not None
    storage = memory.untyped_storage()
    return _count_uses(storage._cdata), sys.getrefcount(storage)


@cache
def _uses_if_unused() -> tuple[int, int]:
    """The same where the tensor alone has its storage. What counts in it is PyTorch's affair."""
    return _uses(torch.empty(1, device="cpu"))
