"""Gradients of weighted objectives, Jᵀ w, from columns that are kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from autogram._arguments import weights_of
from autogram._blocks import Columns, weighted_sums
from autogram._capture import Limit, Objectives, exact, retried_with_less, running_pass
from autogram._errors import InvalidOperandError, MemoryLimitError, UnsupportedError

# Of two threads that find no gradient, one is the first.
_FIRST = threading.Lock()


def weighted_gradients(
    columns: Mapping[Tensor, Columns], weights: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Jᵀ w for each parameter that an objective reaches, in any order.

    Args:
        columns: Those of each parameter.
        weights: ``(k, b)``, or several of them, ``(s, k, b)``.

    Returns:
        Pairs of a parameter and a tensor ``(*parameter)``, or ``(s, *parameter)``.
    """
    for parameter, gradient in weighted_sums(columns, weights):
        if gradient is None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            shape = weights.shape[:-2] + parameter.shape
            gradient = parameter.new_zeros(shape, dtype=dtype)
        yield parameter, gradient


def accumulate_grad(
    objectives: Objectives,
    columns: Mapping[Tensor, Columns],
    w: Tensor,
    limit: Limit,
) -> None:
    """Adds Jᵀ w to ``.grad`` of the parameters, as a backward pass would.

    Args:
        objectives: What the rows belong to.
        columns: Those of each parameter.
        w: ``(m,)``, or of the losses' shape.
        limit: That of the engine.

    Raises:
        InvalidOperandError: The weights have another shape.
        ChangedTensorError: What is kept was changed in place. No gradient is.
        MemoryLimitError: Memory ran out, and again with less. Some gradients are changed.
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
        gradients = _Gradients(columns, weights, limit)
        try:
            while (found := gradients.next()) is not None:
                _accumulate(*found)
        except MemoryLimitError as error:
            error.add_note("Some gradients are in `.grad` already: clear it before another step.")
            raise


class _Gradients:
    """Jᵀ w for one parameter after the other, each once, also where memory runs out in between.

    Args:
        columns: Those of each parameter.
        weights: ``(k, b)``.
        limit: That of the engine.
    """

    def __init__(
        self,
        columns: Mapping[Tensor, Columns],
        weights: Tensor,
        limit: Limit,
    ) -> None:
        self._left = dict(columns)
        self._weights = weights
        self._limit = limit
        self._found: Iterator[tuple[Tensor, Tensor]] | None = None

    @retried_with_less
    def next(self) -> tuple[Tensor, Tensor] | None:
        """Another parameter and its gradient, or ``None`` behind the last one."""
        found, self._found = self._found, None
        if found is None:  # at first, and where memory ran out
            found = weighted_gradients(dict(self._left), self._weights)
        pair = next(found, None)
        self._found = found
        if pair is not None:
            del self._left[pair[0]]
        return pair


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
