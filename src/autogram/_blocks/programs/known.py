"""The programs of an engine, by all that decides about their calls."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from autogram._containers import Latest

# Writing a program down takes as long as choosing the calls of so many.
_WORTH_WRITING = 16

# What is chosen for all layers of a model together takes less time than the calls, and a program of
# all these calls saves a part of that.
_WORTH_WRITING_TOGETHER = 128

# Of so many keys, programs and numbers are kept. A model has a few for each kind of its layers.
_MOST = 2048


class Programs:
    """What was written down, by its key. Several threads may ask.

    A key that is asked for often enough is due. So keys that do not come again, such as those of
    new lengths of texts, cost no writing.
    """

    def __init__(self) -> None:
        self._known = Latest[Hashable, Any](_MOST)
        self._counts = Latest[int, int](_MOST)  # by the hash of a key: it may be large
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """What is known under a key; ``False`` if nothing can be, and ``None`` if nothing is."""
        return self._known.get(key)

    def is_due(self, key: Hashable, *, is_of_many: bool = False) -> bool:
        """Notes that a key was asked for, and says whether to write its program now.

        A program of many layers is long, and saves less for its length.
        """
        number = hash(key)
        with self._lock:
            count = self._counts[number] = self._counts.get(number, 0) + 1
        return count >= (_WORTH_WRITING_TOGETHER if is_of_many else _WORTH_WRITING)

    def put_off(self, key: Hashable) -> None:
        """Has a key wait as if it had not come before: something that passes decided its calls."""
        with self._lock:
            self._counts[hash(key)] = 0

    def keep(self, key: Hashable, known: Any) -> None:
        """Keeps something under a key, or ``False``: the calls cannot be written down."""
        with self._lock:
            self._known[key] = known


def settings_now() -> Hashable:
    """The settings of PyTorch that decide how tensors are contracted."""
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision


def forms(tensors: Sequence[Tensor]) -> Hashable:
    """What decides about calls with some tensors, as long as no value does."""
    return tuple([(x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether some tensors are different ones, of PyTorch's own class, with numbers as they are."""
    plain = {
        id(x)
        for x in tensors
        if type(x) is Tensor and x.layout == torch.strided and not (x.is_conj() or x.is_neg())
    }
    return len(plain) == len(tensors)
