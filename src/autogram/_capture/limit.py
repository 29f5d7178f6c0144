"""Where memory runs out: another attempt with a smaller limit, then an error that names a limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from autogram._blocks import Limit
from autogram._undo import undoing
from autogram.errors import FreedGraphError, MemoryLimitError

ELEMENT_BYTES = 4  # most contractions run in float32
_SMALLER = 8

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def limit_of_bytes(count: int) -> Limit:
    """The limit that a user gives."""
    return Limit(max(1, count // ELEMENT_BYTES))


def retried_with_less(method: F) -> F:
    """A method that is :func:`retried`, with the limit ``self._limit``."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return retried(self._limit, method, self, *args, **kwargs)

    return cast("F", run)


@undoing
def retried(limit: Limit, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function, and calls it once more, with an eighth of the limit, if memory runs out.

    The smaller limit stays, unless it is not enough either. If a function has failed twice, others
    around it that are retried, too, are not called again.
    """
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)
    # Outside of the handler, where nothing keeps the tensors of the first attempt.
    before = limit.elements
    limit.elements = less = max(1, before // _SMALLER)
    try:
        return function(*args, **kwargs)
    except FreedGraphError as error:
        raise MemoryLimitError(
            "Memory ran out in a pass that frees the graph on its way. Run the step again, with a "
            f"new forward pass: one intermediate result may now have {less * ELEMENT_BYTES:,} "
            f"bytes instead of {before * ELEMENT_BYTES:,}. To let the engine try again at once, "
            f"pass `retain_graph=True`. PyTorch says: {message}"
        ) from error
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        limit.elements = before
        raise MemoryLimitError(
            f"Memory ran out with a limit of {before * ELEMENT_BYTES:,} bytes for one "
            f"intermediate result, and again with {less * ELEMENT_BYTES:,}. Pass "
            f"`memory_limit_bytes={max(1, less // _SMALLER) * ELEMENT_BYTES}` to `Engine`, or "
            "make the batch smaller: the activations and their gradients need memory that no "
            f"limit changes. PyTorch says: {error}"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on any device, and no smaller limit was tried yet."""
    if isinstance(error, MemoryLimitError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
