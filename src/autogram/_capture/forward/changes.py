"""Changes of slices: calls that change a part of a tensor in place, element by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._capture.autograd.slices import CHANGE, note_change
from autogram._capture.forward.calls import Kind, first_of
from autogram.rules.expansion import is_of_slices


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

    Each of the slices has the dimensions whole that are not padded. So a slice of one element of
    each padded dimension is noted for all.
    """
    output = F.pad(*args, **kwargs)
    node: Any = output.grad_fn
    while type(node).__name__ == CHANGE:
        padded = len(kwargs["pad"] if "pad" in kwargs else args[1]) // 2
        ends: Any = (..., *(slice(0, 1),) * padded)
        note_change(node, output, output.detach()[ends])
        node = node.next_functions[0][0]
    return output
