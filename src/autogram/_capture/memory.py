"""Memory that runs out: another attempt with a smaller limit, then an error that names one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

from autogram._errors import MemoryLimitError

# Limits count elements; most contractions run in float32.
ELEMENT_BYTES = 4

_SMALLER = 8


class Limited(Protocol):
    """What computes in parts of at most so many elements."""

    _limit: int


P = ParamSpec("P")
T = TypeVar("T")
L = TypeVar("L", bound=Limited)


def retried_with_less(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """The method, which runs once more, with an eighth of its limit, if memory runs out.

    The smaller limit stays: at the next step, memory would run out again.

    Raises:
        MemoryLimitError: It was not enough.
    """

    @wraps(method)
    def run(self: L, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler, where nothing keeps the tensors of the first attempt.
        before, self._limit = self._limit, max(1, self._limit // _SMALLER)
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            tried, self._limit = self._limit, before
            if not is_out_of_memory(error):
                raise
            raise MemoryLimitError(
                f"Memory ran out with a limit of {before * ELEMENT_BYTES:,} bytes for one "
                f"intermediate result, and again with {tried * ELEMENT_BYTES:,}. Pass "
                f"`memory_limit_bytes={max(1, tried // _SMALLER) * ELEMENT_BYTES}` to `Engine`, or "
                "make the batch smaller: the activations and their gradients need memory that no "
                f"limit changes. PyTorch says: {error}"
            ) from error

    return cast("Callable[Concatenate[L, P], T]", run)  # `wraps` is typed with a named argument


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
