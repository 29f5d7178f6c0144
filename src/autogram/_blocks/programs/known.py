"""The programs of an engine, by everything that decides about their calls."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from autogram._containers import Latest

# Recording a program takes as long as choosing its calls this many times.
_WORTH_WRITING = 16

# Choosing for all layers of a model together takes less time than the calls, and a program of
# all these calls saves a part of it.
_WORTH_WRITING_TOGETHER = 128

# The number of keys with kept programs and counts. A model has a few for each kind of layer.
_MOST = 2048


class Programs:
    """The recorded programs, by key. Several threads may use them.

    A key is due once it has been requested often enough. Keys that do not recur, such as those of
    new text lengths, therefore cost no recording.
    """

    def __init__(self) -> None:
        self._known = Latest[Hashable, Any](_MOST)
        self._counts = Latest[int, int](_MOST)  # by the hash of a key: it may be large
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """The program of a key; ``False`` if it cannot be recorded, ``None`` if it is not yet."""
        return self._known.get(key)

    def is_due(self, key: Hashable, *, is_of_many: bool = False) -> bool:
        """Counts a request for a key, and tells whether to record its program now.

        A program of many layers is long, and saves less for its length.
        """
        number = hash(key)
        with self._lock:
            count = self._counts[number] = self._counts.get(number, 0) + 1
        return count >= (_WORTH_WRITING_TOGETHER if is_of_many else _WORTH_WRITING)

    def put_off(self, key: Hashable) -> None:
        """Restarts the count of a key, because something temporary decided its calls."""
        with self._lock:
            self._counts[hash(key)] = 0

    def keep(self, key: Hashable, known: Any) -> None:
        """Keeps a program under a key, or ``False`` if its calls cannot be recorded."""
        with self._lock:
            self._known[key] = known


def settings_now() -> Hashable:
    """The settings of PyTorch that decide how tensors are contracted."""
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision


def forms(tensors: Sequence[Tensor]) -> Hashable:
    """Everything that decides about calls with some tensors, as long as no value does."""
    return tuple([(x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether some tensors are distinct, of PyTorch's own class, and hold plain numbers."""
    plain = {
        id(x)
        for x in tensors
        if type(x) is Tensor and x.layout == torch.strided and not (x.is_conj() or x.is_neg())
    }
    return len(plain) == len(tensors)
