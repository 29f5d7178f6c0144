"""Adds gradients to ``.grad`` of parameters, like a backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autogram.errors import UnsupportedError

# Guards the check-then-set of an empty `.grad`.
_FIRST = threading.Lock()


def dtype_of_grad(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient: its own, unless the user gave it a ``grad_dtype``."""
    given: torch.dtype | None = getattr(parameter, "grad_dtype", None)  # PyTorch 2.11 may lack it
    return given or parameter.dtype


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """A dtype in which to add up numbers of another one. PyTorch itself promotes no float8."""
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


def check_addable(leaves: Iterable[Tensor], names: Mapping[Tensor, str] | None = None) -> None:
    """Refuses to add to float8 gradients, before anything is added to others.

    Args:
        leaves: The tensors that get gradients.
        names: Their names, if they have any.
    """
    for leaf in leaves:
        gradient = leaf.grad
        if gradient is None or gradient.dtype.itemsize > 1 or not leaf.requires_grad:
            continue
        name = (names or {}).get(leaf)
        raise UnsupportedError(
            f"{f'`{name}`' if name else f'A leaf of shape {tuple(leaf.shape)}'} has a gradient in "
            f"{gradient.dtype}, in which PyTorch cannot add. Set it to `None` before the "
            "step, as `optimizer.zero_grad()` does; or, to add up gradients of several steps, set "
            "`parameter.grad_dtype = torch.float32`."
        )


def has_hooks(parameter: Tensor) -> bool:
    """Whether functions are called with a parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def as_gradients(sums: Iterable[tuple[Tensor, Tensor | None]]) -> dict[Tensor, Tensor]:
    """Weighted sums of rows as gradients of parameters: zeros where there is no sum."""
    gradients = {}
    for parameter, total in sums:
        total = torch.zeros_like(parameter) if total is None else total
        gradients[parameter] = total.to(dtype_of_grad(parameter))
    return gradients


def add_to_grad(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Adds to the gradients of parameters. A parameter without a gradient takes the new one over.

    Like a backward pass, it skips parameters frozen since the forward pass, and calls hooks on
    parameters, one parameter after the other.
    """
    others: list[tuple[Tensor, Tensor]] = []
    for parameter, gradient in gradients:
        if not parameter.requires_grad:
            continue
        if has_hooks(parameter):
            torch.autograd.backward([parameter], [gradient])
            continue
        with _FIRST:
            if parameter.grad is None:
                parameter.grad = gradient  # autograd would copy it, as others might hold it, too
                continue
        others.append((parameter, gradient))
    if others:  # in one pass, because each takes as long as many additions
        parameters, added = zip(*others, strict=True)
        torch.autograd.backward(parameters, added)
