"""Weights of a Gramian, and gradients of weighted objectives, Jᵀ w, from columns that are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from autogram._arguments import weights_of
from autogram._blocks import Columns, weighted_sums
from autogram._capture import (
    Limit,
    Objectives,
    exact,
    retried_with_less,
    running_pass,
    without_autocast,
)
from autogram._errors import InvalidOperandError, MemoryLimitError, UnsupportedError

Weighting = Callable[[Tensor], Tensor]

# Of two threads that find no gradient, one is the first.
_FIRST = threading.Lock()


def weights_by(weighting: Weighting, gramian: Tensor) -> Tensor:
    """The weights that a user's function gives, detached, in at least float32."""
    with without_autocast(gramian.device):
        weights = weighting(gramian)
    if not isinstance(weights, Tensor):
        raise InvalidOperandError(
            f"The weighting returned a {type(weights).__name__}. Return a tensor of weights from "
            "it, `(m,)` or of the shape of the losses."
        )
    return weights.detach().to(torch.promote_types(weights.dtype, torch.float32))


def accumulate_grad(
    objectives: Objectives, columns: Mapping[Tensor, Columns], w: Tensor, limit: Limit
) -> None:
    """Adds Jᵀ w to ``.grad`` of the parameters, as a backward pass would.

    Args:
        objectives: What the rows belong to.
        columns: Those of each parameter.
        w: ``(m,)``, or of the losses' shape.
        limit: That of the engine.

    Raises:
        InvalidOperandError: The weights have another shape.
        ChangedTensorError: A tensor of the columns was changed in place. No gradient is.
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
        try:
            for parameter, gradient in _Gradients(columns, weights, limit):
                _accumulate(parameter, gradient)
        except MemoryLimitError as error:
            error.add_note("Some gradients are in `.grad` already: clear it before another step.")
            raise


class _Gradients:
    """Jᵀ w for each parameter once, also where memory runs out in between."""

    def __init__(self, columns: Mapping[Tensor, Columns], weights: Tensor, limit: Limit) -> None:
        self._left = dict(columns)
        self._weights = weights
        self._limit = limit
        self._sums: Iterator[tuple[Tensor, Tensor | None]] | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self._left:
            yield self._next()

    @retried_with_less
    def _next(self) -> tuple[Tensor, Tensor]:
        """Another parameter and its gradient."""
        sums, self._sums = self._sums, None
        if sums is None:  # at first, and where memory ran out
            sums = weighted_sums(dict(self._left), self._weights)
        parameter, gradient = next(sums)
        del self._left[parameter]
        self._sums = sums
        return parameter, torch.zeros_like(parameter) if gradient is None else gradient


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
