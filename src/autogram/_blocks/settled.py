"""Settled functions: what they do is found out once, and then only done.

How blocks are contracted follows from their forms alone. To find it out takes hundreds of Python
calls, which is longer than many a contraction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from autogram._blocks.program import Program, Slot
from autogram._blocks.tracer import Tracer

# Batches of varying length give forms that may never come again: the first time, nothing is traced.
_WORTH_A_TRACE = 2

# What is remembered of all forms together, in about fifty bytes each.
_MOST = 2**20
_PER_CALL = 8

P = ParamSpec("P")
R = TypeVar("R", Tensor, tuple[Tensor, ...])


def settled(function: Callable[P, R]) -> Callable[P, R]:
    """A function that makes the calls to PyTorch that it made for arguments of the same forms.

    Args:
        function: A function of lists of blocks, tensors, memory (whatever can be called) and
            options (whatever can be hashed), by position. What it does must follow from their forms
            and from the options. Where it reads values of a tensor, or a tensor that it was not
            given, nothing is settled. Settled functions that it calls are parts of it.
    """

    @wraps(function)
    def carry_out(*args: P.args, **kwargs: P.kwargs) -> R:
        form = None if kwargs or Tracer.is_active() else _Form(function, args)
        if form is None or not form.is_plain:
            return function(*args, **kwargs)
        key = tuple(form.key)
        memo = _MEMOS.find(key)
        if memo.program is not None:
            found: R = memo.program(form.inputs)
            return found
        memo.sights += 1
        if memo.sights < _WORTH_A_TRACE or memo.was_traced or not form.is_traceable:
            return function(*args, **kwargs)
        memo.was_traced = True
        with Tracer(form.inputs) as tracer:
            result = function(*args, **kwargs)
        memo.program = tracer.program(result)
        if memo.program is not None:
            _MEMOS.weigh(key, _PER_CALL * len(memo.program))
        return result

    return carry_out


class _Form:
    """The arguments of a call, taken apart.

    Attributes:
        key: What the calls to PyTorch follow from.
        inputs: Tensors and memory.
        is_plain: Whether all tensors are nothing but tensors.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.key: list[Hashable] = [function, torch._C._get_mkldnn_enabled()]
        self.inputs: list[Any] = []
        self.is_plain = True
        for arg in args:
            if isinstance(arg, list):
                self.key.append(len(arg))
                for block in arg:
                    self.key.append(block.equation)
                    self.inputs += block.operands
            elif isinstance(arg, Tensor) or callable(arg):
                self.key.append(Slot)
                self.inputs.append(arg)
            else:
                self.key.append(arg)
        first: dict[int, int] = {}
        for place, x in enumerate(self.inputs):
            known = first.setdefault(id(x), place)
            if known != place:
                self.key.append(known)  # what is one tensor now may be two the next time
            elif type(x) is Tensor:
                self.key += (x.shape, x.stride(), x.dtype, x.device)
            elif isinstance(x, Tensor):
                self.is_plain = False

    @property
    def is_traceable(self) -> bool:
        """Whether changes in place are counted, by which a trace sees them."""
        tensors = (x for x in self.inputs if isinstance(x, Tensor))
        return not (torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors))


class _Memo:
    """What is known of a function for arguments of some forms."""

    def __init__(self) -> None:
        self.sights = 0
        self.was_traced = False
        self.program: Program | None = None
        self.weight = 0
        self.asked_for = 0


class _Memos:
    """The memos of all functions and forms, without those that were longest not asked for."""

    def __init__(self) -> None:
        self._memos: dict[Hashable, _Memo] = {}
        self._weight = 0
        self._questions = 0
        self._lock = threading.Lock()

    def find(self, key: tuple[Hashable, ...]) -> _Memo:
        """The memo of a function and some forms."""
        with self._lock:
            self._questions += 1
            memo = self._memos.get(key)  # once: to hash a key takes as long as a small product
            if memo is not None:
                memo.asked_for = self._questions
                return memo
            memo = self._memos[key] = _Memo()
            memo.asked_for = self._questions
        self.weigh(key, len(key))
        return memo

    def weigh(self, key: Hashable, weight: int) -> None:
        """Adds to the weight of a memo, and drops others if all are too heavy together."""
        with self._lock:
            memo = self._memos.get(key)
            if memo is None:  # another thread has dropped it
                return
            memo.weight += weight
            self._weight += weight
            if self._weight > _MOST:
                self._drop()

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._memos.clear()
            self._weight = 0

    def _drop(self) -> None:
        """Drops memos until half of the weight is left, but not the one last asked for."""
        *others, _ = sorted(self._memos.items(), key=lambda item: item[1].asked_for)
        for key, memo in others:
            if self._weight <= _MOST // 2:
                break
            del self._memos[key]
            self._weight -= memo.weight


_MEMOS = _Memos()
