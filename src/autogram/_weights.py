"""Weights: the functions that compute them, and checks before multiplication into ``.grad``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor

from autogram._arguments import without_values
from autogram._capture.autograd.exact import without_autocast
from autogram._capture.autograd.grad import at_least_single
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.replays import Flag, Replays, is_captured
from autogram.errors import InvalidOperandError, NonFiniteError, listed

Weighting = Callable[[Tensor], Tensor]

_ZERO = torch.zeros((), device="cpu")  # combines with tensors of any device, without a launch

# Weightings of torchjd that only need the number of rows, so that they also accept a Gramian.
_FOR_ANYTHING = {"ConstantWeighting", "MeanWeighting", "RandomWeighting", "SumWeighting"}


def check_weighting(weighting: Any) -> None:
    """Refuses a weighting that is not a function of a Gramian."""
    if not callable(weighting):
        raise InvalidOperandError(
            f"The weighting is a {type(weighting).__name__}. Pass a function that maps the Gramian "
            "`(m, m)` to weights `(m,)`. Known weights need no Gramian: call "
            "`losses.backward(weights)`."
        )
    if isinstance(weighting, type):
        name = weighting.__name__
        raise InvalidOperandError(
            f"The weighting is the class `{name}`. Pass an instance, `{name}()`."
        )
    rows = "`engine.jacobian(losses).rows(slice(None))`"
    name, kinds = type(weighting).__name__, _kinds_in_torchjd(weighting)
    if "Aggregator" in kinds:
        has_weighting = "GramianWeightedAggregator" in kinds
        raise InvalidOperandError(
            f"`{name}` is an aggregator, which maps the rows of J to a direction, but the engine "
            "needs weights. Pass "
            + (f"`{name}().gramian_weighting`." if has_weighting else f"the rows to it: {rows}.")
        )
    while kinds := _kinds_in_torchjd(weighting):  # one weighting may contain another
        name = type(weighting).__name__
        maps = getattr(getattr(weighting, "fn", None), "__name__", "")
        if "_Composition" in kinds and maps == "compute_gramian":
            raise InvalidOperandError(
                "The weighting computes a Gramian of its input, but its input is a Gramian. "
                "Leave out `compute_gramian`; of an aggregator, pass `gramian_weighting`."
            )
        if "_MatrixWeighting" in kinds and name not in _FOR_ANYTHING:
            raise InvalidOperandError(
                f"`{name}` takes the rows of J, but the engine gives it the Gramian. Pass a "
                "weighting of Gramians, such as `UPGradWeighting()`; or pass the rows to it, "
                f"{rows}, and its weights to `losses.backward`."
            )
        weighting = getattr(weighting, "weighting", None)


def _kinds_in_torchjd(value: Any) -> set[str]:
    """The names of a value's classes, if they are torchjd's. torchjd need not be installed."""
    return {c.__name__ for c in type(value).__mro__ if c.__module__.split(".")[0] == "torchjd"}


def weights_by(weighting: Weighting, gramian: Tensor) -> Tensor:
    """The weights from a user's function, detached, in at least float32.

    Without objectives, the function is not called.
    """
    if not len(gramian):
        return gramian.new_zeros(0)
    version = gramian._version
    with without_autocast(gramian.device):
        weights = weighting(gramian)
    if gramian._version != version:
        raise InvalidOperandError(
            "The weighting changed its Gramian in place. Compute with a copy in it, "
            "`gramian.clone()`."
        )
    if not isinstance(weights, Tensor):
        raise InvalidOperandError(
            f"The weighting returned a {type(weights).__name__}. Return a tensor of weights, "
            "`(m,)` or of the shape of the losses."
        )
    check_numbers(weights)
    return weights.detach().to(at_least_single(weights.dtype))


def weights_of(w: Tensor, objectives: Objectives, *, can_be_stack: bool = False) -> Tensor:
    """Weights as ``(k, b)``; or as ``(s, k, b)``, if several vectors are given and allowed."""
    if not isinstance(w, Tensor):
        raise InvalidOperandError(
            f"A {type(w).__name__} was given. Pass one tensor with an element for each objective, "
            "`(m,)`, in the order of the Gramian."
        )
    check_numbers(w)
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


class FiniteWeights:
    """Refuses weights that are not finite, for an engine and its Jacobians.

    On a CPU, it does so at once. On a GPU, a step would have to wait for its own weights;
    instead, the device replaces them by zeros, and a later call raises the error.
    """

    def __init__(self, replays: Replays) -> None:
        self._replays = replays
        self._unread: list[Flag] = []  # whether the weights of earlier calls were finite

    def usable(self, weights: Tensor, dtype: torch.dtype, gramian: Tensor | None = None) -> Tensor:
        """Weights to multiply into ``.grad``, or zeros if they will be refused later.

        Args:
            weights: Real numbers.
            dtype: The dtype of the products, in which the weights must be finite.
            gramian: The Gramian that the weights were computed from, for the message.

        Raises:
            NonFiniteError: They are not finite, and the host knows it.
        """
        if _is_read_at_once(weights.device) or not weights.numel():
            check_finite(weights, dtype, gramian)
            return weights
        is_finite = _largest(weights, dtype) < torch.inf
        if not is_captured(weights.device):
            self._unread.append(Flag([is_finite]))
        elif self._replays.add([~is_finite]):
            return weights  # nobody would read the flag: the gradients have to show it
        return torch.where(is_finite, weights, _ZERO)

    def check(self, *, waits: bool = False) -> None:
        """Raises if weights of an earlier call were refused, as far as the host knows.

        If it ``waits`` for the device, the host knows all.
        """
        for flag in tuple(self._unread):
            if not (waits or flag.has_arrived):
                continue
            with suppress(ValueError):  # another thread has read it
                self._unread.remove(flag)
            if not flag.read():
                raise NonFiniteError(
                    "An earlier call had weights that are infinite or not a number. A step on a "
                    "GPU does not wait for its weights, and has used zeros instead. Look for a "
                    "division by zero in the weighting, and for an overflow in the losses. To find "
                    "the step, call `engine.check_replays()` after each step."
                )


def check_finite(weights: Tensor, dtype: torch.dtype, gramian: Tensor | None = None) -> None:
    """Refuses weights that are not finite. Waits for the device."""
    # Avoids PyTorch calls that modes see: on a CPU, nothing waits.
    if not weights.numel() or isfinite(cast("float", _largest(weights, dtype).tolist())):
        return
    if gramian is None:
        raise NonFiniteError(
            "`accumulate_grad` got weights that are infinite or not a number, of the objectives "
            f"{_numbers_of(weights, dtype)}, and has added nothing to `.grad`. Look for a division "
            "by zero or an overflow in their computation."
        )
    if not bool(gramian.isfinite().all()):
        # One bad row spoils its column in all other rows.
        rows = _numbers_of(gramian.diagonal(), gramian.dtype)
        raise NonFiniteError(
            "The weights are infinite or not a number, and nothing was added to `.grad`. So is the "
            f"Gramian, in the rows of the objectives {rows}: look for a division by zero or "
            "an overflow in these losses. Use `torch.autograd.detect_anomaly()` to find it. To "
            "skip such steps, pass a gradient scaler: `engine.backward(losses, weighting, "
            "scaler=scaler)`."
        )
    raise NonFiniteError(
        f"The weights of the objectives {_numbers_of(weights, dtype)} are infinite or not a "
        "number, and nothing was added to `.grad`. The Gramian is finite. Look for a division by "
        "zero in the weighting, such as by the norm of a gradient that is zero."
    )


def check_norms(norms: Tensor) -> None:
    """Refuses norms of gradients that are not finite, if the host has them without waiting."""
    if not _is_read_at_once(norms.device) or bool(norms.isfinite().all()):
        return
    raise NonFiniteError(
        f"The gradients of the samples {_numbers_of(norms, norms.dtype)} have norms that are "
        "infinite or not a number, and nothing was added to `.grad`. Look for a division by zero "
        "or an overflow in these losses; `torch.autograd.detect_anomaly()` finds it."
    )


def check_numbers(vector: Tensor, what: str = "A vector") -> None:
    """Refuses any vector but a dense one of real numbers with values."""
    is_real = not (vector.is_complex() or vector.is_quantized)
    if not is_real or vector.layout != torch.strided:
        raise InvalidOperandError(
            f"{what} of dtype {vector.dtype} and layout {vector.layout} was given. Pass real "
            "numbers in a dense tensor: `.real` of a complex one, `.to_dense()` of a sparse one."
        )
    if place := without_values(vector):
        raise InvalidOperandError(
            f"{what} of shape {tuple(vector.shape)} is {place}, which has no values. Pass a tensor "
            f"with values, such as `torch.ones(..., device=gramian.device)`."
        )


def _is_read_at_once(device: torch.device) -> bool:
    """Whether the host can read a tensor on a device without waiting."""
    return device.type == "cpu"


def _largest(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest absolute weight in a dtype; not a number, if one weight is not."""
    largest: Tensor = torch.linalg.vector_norm(weights.detach().to(dtype), torch.inf)
    return largest


def _numbers_of(values: Tensor, dtype: torch.dtype) -> str:
    """The numbers of the objectives whose values are not finite in a dtype, as text."""
    places = (~values.detach().to(dtype).isfinite()).flatten().nonzero().flatten()
    return listed([str(place) for place in places.tolist()])
