"""Gradients into ``.grad``, as a backward pass puts them there."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to a parameter's gradient, of which it becomes the owner if there was none."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None and not _has_hooks(parameter):
        parameter.grad = gradient  # autograd would copy it, as someone else might hold it too
    else:
        torch.autograd.backward([parameter], [gradient])


def _has_hooks(parameter: Tensor) -> bool:
    """Whether something is to be called with the gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
