"""Calls of torch functions, and what is known of a function by its name."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

# Calls that tell something about a tensor and compute nothing: a third of all in some models.
_PROPERTIES = (
    "shape dtype device ndim layout is_cuda requires_grad is_leaf grad_fn is_nested is_sparse"
)
_METHODS = "size dim numel stride is_contiguous is_floating_point is_complex element_size __len__"
_QUESTIONS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
}
_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda"}
_SHOW_COTANGENTS = {"retain_grad", "register_hook"}
_LOOK_AT_OTHER = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
_IN_PLACE_OPERATORS = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "matmul", "truediv", "div", "pow", "mod")),
}


class Kind(NamedTuple):
    """What is known of a torch function."""

    name: str
    is_question: bool
    """It computes no tensor."""
    is_in_place: bool
    """It changes its first argument."""
    is_cast: bool
    """Its output has the elements of its first argument."""
    shows_cotangent: bool
    """The user may see the cotangent of its first argument by it."""
    reads_first_only: bool
    """Its other tensors give no more than a dtype or a shape, as in ``x.to(y)``."""


class Call(NamedTuple):
    """A torch function with its arguments."""

    function: Callable[..., Any]
    kind: Kind
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def results(self, output: Any) -> list[Tensor]:
        """The tensors of its output, or those that were changed in place."""
        if self.kind.is_in_place:
            return tensors_among(self.args[:1])
        return [output] if isinstance(output, Tensor) else tensors_among((output,))


def tensors_among(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments of a torch call, and in its lists and tuples of them."""
    found = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found.extend([item for item in argument if isinstance(item, Tensor)])
    return found


@lru_cache(maxsize=4096)
def kind_of(function: Callable[..., Any]) -> Kind:
    """What is known of a torch function."""
    name = getattr(function, "__name__", str(function))
    return Kind(
        name,
        function in _QUESTIONS,
        name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")),
        name in _CASTS,
        name in _SHOW_COTANGENTS,
        name in _LOOK_AT_OTHER,
    )


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
