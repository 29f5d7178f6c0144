"""Weights: the functions that give them, and what may be multiplied into ``.grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autogram._capture.autograd.exact import without_autocast
from autogram._capture.samples.objectives import Objectives
from autogram._errors import InvalidOperandError

Weighting = Callable[[Tensor], Tensor]

# Weightings of torchjd for matrices that use the number of rows alone, so that a Gramian will do.
_FOR_ANYTHING = {"ConstantWeighting", "MeanWeighting", "RandomWeighting", "SumWeighting"}


def check_weighting(weighting: Any) -> None:
    """Refuses a weighting that is no function of a Gramian."""
    if not callable(weighting):
        raise InvalidOperandError(
            f"The weighting is a {type(weighting).__name__}. Pass a function that maps the Gramian "
            "`(m, m)` to weights `(m,)`. Weights that are known need no Gramian: call "
            "`losses.backward(weights)`."
        )
    if isinstance(weighting, type):
        name = weighting.__name__
        raise InvalidOperandError(
            f"The weighting is the class `{name}`. Pass an object of it, as `{name}()`."
        )
    rows = "`engine.jacobian(losses).rows(slice(None))`"
    name, kinds = type(weighting).__name__, _kinds_in_torchjd(weighting)
    if "Aggregator" in kinds:
        has_weighting = "GramianWeightedAggregator" in kinds
        raise InvalidOperandError(
            f"`{name}` is an aggregator, which maps the rows of J to a direction, and the engine "
            "asks for weights. Pass "
            + (f"`{name}().gramian_weighting`." if has_weighting else f"the rows to it: {rows}.")
        )
    while kinds := _kinds_in_torchjd(weighting):  # a weighting may be inside of another
        name = type(weighting).__name__
        maps = getattr(getattr(weighting, "fn", None), "__name__", "")
        if "_Composition" in kinds and maps == "compute_gramian":
            raise InvalidOperandError(
                "The weighting makes a Gramian of what it is given, and the engine gives it one. "
                "Leave out `compute_gramian`; of an aggregator, pass `gramian_weighting`."
            )
        if "_MatrixWeighting" in kinds and name not in _FOR_ANYTHING:
            raise InvalidOperandError(
                f"`{name}` takes the rows of J, and the engine has the Gramian. Pass a weighting "
                f"of Gramians, such as `UPGradWeighting()`; or the rows to it, {rows}, and its "
                "weights to `losses.backward`."
            )
        weighting = getattr(weighting, "weighting", None)


def _kinds_in_torchjd(value: Any) -> set[str]:
    """The names of the classes of torchjd that a value is of. torchjd need not be installed."""
    return {c.__name__ for c in type(value).__mro__ if c.__module__.split(".")[0] == "torchjd"}


def weights_by(weighting: Weighting, gramian: Tensor) -> Tensor:
    """The weights that a user's function gives, detached, in at least float32.

    Of no objectives, it is not called.
    """
    if not len(gramian):
        return gramian.new_zeros(0)
    version = gramian._version
    with without_autocast(gramian.device):
        weights = weighting(gramian)
    if gramian._version != version:
        raise InvalidOperandError(
            "The weighting changed the Gramian that it was given in place. Compute with a copy of "
            "it there, `gramian.clone()`."
        )
    if not isinstance(weights, Tensor):
        raise InvalidOperandError(
            f"The weighting returned a {type(weights).__name__}. Return a tensor of weights, "
            "`(m,)` or of the shape of the losses."
        )
    _check_real(weights)
    return weights.detach().to(torch.promote_types(weights.dtype, torch.float32))


def weights_of(w: Tensor, objectives: Objectives, *, can_be_stack: bool = False) -> Tensor:
    """Weights as ``(k, b)``, or as ``(s, k, b)`` if several vectors were given, and can be."""
    if not isinstance(w, Tensor):
        raise InvalidOperandError(
            f"A {type(w).__name__} was given. Pass one tensor with an element for each objective, "
            "`(m,)`, in the order of the Gramian."
        )
    _check_real(w)
    losses = objectives.losses
    shapes = [(losses.numel(),), tuple(losses.shape)]
    is_stack = tuple(w.shape) not in shapes
    fits = can_be_stack and w.dim() > 0 and tuple(w.shape[1:]) in shapes
    if is_stack and not fits:
        raise InvalidOperandError(
            f"A vector of shape {tuple(w.shape)} was given. For losses of shape "
            f"{tuple(losses.shape)}, pass {shapes[0]} or the losses' shape"
            + (", or a stack of such." if can_be_stack else ". Stacks of vectors are for `vjp`.")
        )
    return objectives.by_sample(w.detach().reshape((*w.shape[:is_stack], *losses.shape)))


def _check_real(vector: Tensor) -> None:
    """Refuses numbers that are no multiples of objectives, or not there one by one."""
    if vector.is_complex() or vector.layout != torch.strided:
        raise InvalidOperandError(
            f"A vector of dtype {vector.dtype} and layout {vector.layout} was given. Pass real "
            "numbers in a dense tensor: of complex ones, `.real`; of a sparse one, `.to_dense()`."
        )
