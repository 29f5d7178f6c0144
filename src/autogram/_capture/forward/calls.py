"""Calls of torch functions, and properties of a function that follow from its name."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._blocks import QUESTIONS
from autogram._capture.autograd.slices import CHANGE, is_pointwise, note_change
from autogram.rules.expansion import is_of_slices

# A third of all calls in some models.
_QUESTIONS = {
    *QUESTIONS,
    # PyTorch sets it for a custom autograd Function that changes a view in place, and holds a lock
    # then: to read the view's other properties would wait for that lock without end.
    Tensor._backward_hooks.__set__,  # type: ignore[union-attr]  # of the class, a descriptor
}
_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda"}
_LOOK_AT_OTHER = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "div", "pow", "mod")
_ASSIGNMENTS = ("__setitem__", "copy_", "fill_", "zero_")
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
# What gives gradients that may be differentiated again, or tangents, which the calls before have
# computed beside their results, or calls a function of the user's.
_OF_OTHERS = {
    torch.autograd.grad,
    Tensor.grad.__get__,  # type: ignore[union-attr]  # of the class, a descriptor
    torch._VF._unpack_dual,
    F.triplet_margin_with_distance_loss,
}
# What autocast carries out in half precision, on each kind of device.
_IN_HALF = {
    F.linear,
    F.scaled_dot_product_attention,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    *(getattr(torch, f"conv{kind}{n}d") for kind in ("", "_transpose") for n in (1, 2, 3)),
    *(
        getattr(owner, name)
        for owner in (torch, Tensor)
        for name in ("matmul", "mm", "bmm", "addmm", "baddbmm")
    ),
}


class Kind(NamedTuple):
    """A torch function, and properties that follow from its name."""

    function: Callable[..., Any]
    name: str
    is_question: bool
    """Whether the function computes no tensor, or gives a parameter its first numbers."""
    is_in_place: bool
    """Whether the function changes its first argument."""
    is_cast: bool
    """Whether the output has the elements of the first argument."""
    shows_cotangent: bool
    """Whether the function lets the user see the cotangent of its first argument."""
    reads_first_only: bool
    """Whether other arguments give no more than a dtype or a shape, as in ``x.to(y)``."""
    reads_others: bool
    """Whether the function may read parameters that are none of its arguments."""
    changes_slices: bool
    """Whether the function may change a slice in place, each element by those in its place."""
    is_in_half: bool
    """Whether autocast rounds the function's arguments."""


@lru_cache(maxsize=4096)
def kind_of(function: Callable[..., Any]) -> Kind:
    """A torch function with its properties."""
    name = getattr(function, "__name__", str(function))
    is_init = getattr(function, "__module__", "") == "torch.nn.init"
    return Kind(
        function,
        name,
        is_question=function in _QUESTIONS or is_init,
        is_in_place=name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")),
        is_cast=name in _CASTS,
        shows_cotangent=name in ("retain_grad", "register_hook"),
        reads_first_only=name in _LOOK_AT_OTHER,
        reads_others=function in _OF_OTHERS,
        changes_slices=function is F.pad or _is_by_element(function, name),
        is_in_half=function in _IN_HALF,
    )


def _is_by_element(function: Callable[..., Any], name: str) -> bool:
    """Whether a function changes each element of its first argument by those in its place."""
    is_known = name in _ASSIGNMENTS or (name.endswith("_") and is_pointwise(name[:-1]))
    return is_known and function is getattr(Tensor, name, None)


def first_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a call, which an in-place call changes: a tensor, or a list of them."""
    return args[0] if args else next(iter(kwargs.values()), None)


def results_of(
    kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> Sequence[Tensor]:
    """The tensors that a call has computed: in its output, or changed in place."""
    computed = first_of(args, kwargs) if kind.is_in_place else output
    if isinstance(computed, Tensor):
        return (computed,)
    is_several = isinstance(computed, (list, tuple))
    return [item for item in computed if isinstance(item, Tensor)] if is_several else ()


def changed_part(kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The part of a tensor that a call changes element by element, or ``None``.

    That is a view which the call is given, or makes by numbers and slices.
    """
    changed = first_of(args, kwargs) if kind.changes_slices and kind.is_in_place else None
    if not isinstance(changed, Tensor) or changed.layout != torch.strided:
        return None
    if kind.name != "__setitem__":
        return None if changed._base is None else changed
    return changed.detach()[args[1]] if is_of_slices(args[1]) else None


def run_and_note(kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Makes a call. Notes at autograd's node which part of a tensor the call has changed."""
    if kind.function is F.pad:
        return _padded(*args, **kwargs)
    part = changed_part(kind, args, kwargs)
    if part is None:
        return kind.function(*args, **kwargs)
    changed = first_of(args, kwargs)
    whole = changed if changed._base is None else changed._base
    before = whole.grad_fn
    output = kind.function(*args, **kwargs)
    node = whole.grad_fn
    if node is not before and type(node).__name__ == CHANGE:
        note_change(node, whole, part)
    return output


def _padded(*args: Any, **kwargs: Any) -> Tensor:
    """A padded tensor. If its ends are copies of its slices, as in a circle, these are noted.

    A slice of one element of each padded dimension stands for all.
    """
    output = F.pad(*args, **kwargs)
    node: Any = output.grad_fn
    while type(node).__name__ == CHANGE:
        padded = len(kwargs["pad"] if "pad" in kwargs else args[1]) // 2
        ends: Any = (..., *(slice(0, 1),) * padded)
        note_change(node, output, output.detach()[ends])
        node = node.next_functions[0][0]
    return output


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@lru_cache(maxsize=256)
def inlined(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a torch function that runs its body, or ``None`` if it has none in Python.

    Under a mode, ``F.multi_head_attention_forward`` calls the mode instead of its body, and would
    do so without end. In the copy, the checks for a mode answer no.
    """
    is_python = isinstance(function, types.FunctionType)
    if not is_python or function.__globals__.keys().isdisjoint(_CHECKS):
        return None
    unchecked = {**function.__globals__, **dict.fromkeys(_CHECKS, lambda *_: False)}
    defaults, closure = function.__defaults__, function.__closure__
    copy = types.FunctionType(function.__code__, unchecked, function.__name__, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
