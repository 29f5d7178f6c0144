"""Hooks on tensors that are no leaves: no node tells of them, so that they are noted when set."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_KEY = "autogram: a hook is on a tensor"  # in the dict that a node keeps for its users
_RETAINING = WeakIdKeyDictionary()
"""The tensors that keep their gradient."""
_LOCK = threading.Lock()
_IS_NOTED = threading.Event()  # set once there was a hook


def note_hooks() -> None:
    """Lets hooks be noted from now on that are set on any tensor."""
    tensors: Any = Tensor
    with _LOCK:
        if not hasattr(tensors.register_hook, "is_noted"):
            tensors.register_hook = _noting(tensors.register_hook, _note_hook)
            tensors.retain_grad = _noting(tensors.retain_grad, _note_retaining)


def are_hooked(nodes: Iterable[Any]) -> bool:
    """Whether a hook was set on a result of some nodes."""
    return _IS_NOTED.is_set() and any(_KEY in node.metadata for node in nodes)


def retaining() -> list[Tensor]:
    """The tensors that keep their gradient."""
    return [x for x in list(_RETAINING) if x.retains_grad] if _RETAINING else []


def _noting(method: Any, note: Any) -> Any:
    """A method of tensors that also notes the tensor."""

    @wraps(method)
    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = method(tensor, *args, **kwargs)
        note(tensor)
        return result

    noting.is_noted = True  # type: ignore[attr-defined]  # functions take attributes
    return noting


def _note_hook(tensor: Tensor) -> None:
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[_KEY] = True
        _IS_NOTED.set()


def _note_retaining(tensor: Tensor) -> None:
    if not torch.compiler.is_compiling() and tensor.retains_grad:
        _RETAINING[tensor] = True
