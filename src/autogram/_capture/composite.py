"""Python functions of torch whose body must be recorded, and not the call as a whole."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@lru_cache(maxsize=256)
def inlined(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a torch function that runs its body, or ``None`` if it has none in Python.

    Under a mode, ``F.multi_head_attention_forward`` hands itself to the mode and stops; called
    from there again, it does the same without end. In the copy, the checks for a mode answer no.
    The original is not touched, and the functions that the body calls are recorded as usual.
    """
    if not isinstance(function, types.FunctionType):
        return None
    if not any(name in function.__globals__ for name in _CHECKS):
        return None
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(_CHECKS, _no)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    """No argument overrides torch functions."""
    return False
