"""Adds gradients to ``.grad`` of parameters, as a backward pass would."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# Of two threads that find no gradient, one is the first.
_FIRST = threading.Lock()


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to a parameter's gradient, of which it becomes the owner if there was none.

    As in a backward pass, a parameter that was frozen since the forward pass gets none.
    """
    if not parameter.requires_grad:
        return
    # Hooks are to be called with the gradient.
    if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        with _FIRST:
            if parameter.grad is None:
                parameter.grad = gradient  # autograd would copy it, as others might hold it too
                return
    torch.autograd.backward([parameter], [gradient])
