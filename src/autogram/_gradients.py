"""Gradients of weighted objectives, Jᵀ w, from columns that are kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from autogram._blocks import Columns, Memory, weighted_sums
from autogram._capture import Objectives, exact, running_pass
from autogram._errors import InvalidOperandError, UnsupportedError
from autogram._operands import weights_of

# Of two threads that find no gradient, one is the first.
_FIRST = threading.Lock()


def weighted_gradients(
    columns: Mapping[Tensor, Columns], weights: Tensor, limit: int, memory: Memory | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Jᵀ w for each parameter that an objective reaches, in any order.

    Args:
        columns: Those of each parameter.
        weights: ``(k, b)``, or several of them, ``(s, k, b)``.
        limit: The number of elements that one intermediate result may have.
        memory: Where to put them.

    Returns:
        Pairs of a parameter and a tensor ``(*parameter)``, or ``(s, *parameter)``.
    """
    for parameter, gradient in weighted_sums(columns, weights, limit, memory):
        if gradient is None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            shape = weights.shape[:-2] + parameter.shape
            gradient = parameter.new_zeros(shape, dtype=dtype)
        yield parameter, gradient


def accumulate_grad(
    objectives: Objectives,
    columns: Mapping[Tensor, Columns],
    w: Tensor,
    limit: int,
    memory: Memory | None = None,
) -> None:
    """Adds Jᵀ w to ``.grad`` of the parameters, as a backward pass would.

    Args:
        objectives: What the rows belong to.
        columns: Those of each parameter.
        w: ``(m,)``, or of the losses' shape.
        limit: The number of elements that one intermediate result may have.
        memory: Where to put the gradients.

    Raises:
        InvalidOperandError: The weights have another shape.
        ChangedTensorError: What is kept was changed in place. No gradient is.
        UnsupportedError: A backward pass of an engine is under way.
    """
    if running_pass() is not None:
        raise UnsupportedError(
            "Gradients are to be added to `.grad` inside of a backward pass of an engine, by a "
            "hook or a custom autograd Function. Such passes are made as often as samples are "
            "looked for, and leave `.grad` as it was. Add them outside."
        )
    for of_parameter in columns.values():
        of_parameter.check()
    with exact(objectives.losses.device):
        weights = weights_of(w, objectives)
        if weights.dim() == 3:
            raise InvalidOperandError(
                f"The weights have shape {tuple(w.shape)}, a stack of vectors, and `.grad` takes "
                "one. Pass one vector, or use `vjp`."
            )
        for parameter, gradient in weighted_gradients(columns, weights, limit, memory):
            _accumulate(parameter, gradient)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to a parameter's gradient, of which it becomes the owner if there was none."""
    if gradient.dtype != parameter.dtype:
        gradient = gradient.to(parameter.dtype)
    # Hooks are to be called with the gradient.
    has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    if not has_hooks:
        with _FIRST:
            if parameter.grad is None:
                parameter.grad = gradient  # autograd would copy it, as others might hold it too
                return
    torch.autograd.backward([parameter], [gradient])
