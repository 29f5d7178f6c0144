"""Rounding: how far apart two right results may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from math import hypot, sqrt
from typing import Any

import torch
from torch import Tensor

from autogram._capture.autograd.graph import kind_of_node, use_of
from autogram._capture.backward.witness import norm, real_numbers
from autogram._capture.samples.objectives import Objectives

# Errors up to so many times autograd's rounding errors are not blamed on the engine.
_MOST_ROUNDINGS = 8
# Shares of an entry that one of two summands may get, exact in any dtype.
_SHARES = (3 / 8, 5 / 8), (5 / 16, 7 / 16)
# The most passes that a sum is split into.
_MOST_PASSES = 8

# Rounding changes a sum over both halves of the samples by at most this share of the tolerance:
# each sample keeps its numbers, and only sums over samples are rounded differently.
_SHARE_OF_HALVES = 1 / 4

# With TF32, matrix products and convolutions keep ten bits of each number in float32.
_EPSILON_OF_TF32 = 2.0**-10
_EXACT = {"none", "ieee"}
_BY_CUDNN = ("Convolution", "CudnnRnn")

_Gradients = Mapping[Tensor, Tensor | None]


class Rounding:
    """The effect of rounding on Jᵀ u, measured with additional passes of autograd.

    Args:
        vector: u, of the losses' shape.
        gradients: Jᵀ u for each parameter.
        objectives: The objectives of the losses.
        differentiate: Makes a pass: Jᵀ v for another vector v.
    """

    def __init__(
        self,
        vector: Tensor,
        gradients: _Gradients,
        objectives: Objectives,
        differentiate: Callable[[Tensor], _Gradients],
    ) -> None:
        self._vector, self._gradients = vector, gradients
        self._objectives, self._differentiate = objectives, differentiate

    def explains(self, parameter: Tensor, distance: float, limit: float) -> bool:
        """Whether rounding explains the distance of a product from Jᵀ u for one parameter.

        A nonlinear hook on gradients changes the sums that measure rounding. Unlike rounding, it
        also changes the sum over both halves of the samples, or Jᵀ (-u / 2).

        Args:
            parameter: A parameter that the losses depend on.
            distance: The norm of the difference of both.
            limit: The largest distance that needs no measurement.
        """
        if distance > _MOST_ROUNDINGS * self._errors.get(parameter, 0.0):
            return False
        apart, size = self._of_halves[parameter]
        cancelled = size / (norm(self._gradients[parameter]) or size or 1.0)
        return apart <= _SHARE_OF_HALVES * limit * max(1.0, cancelled)

    @property
    def is_measured(self) -> bool:
        """Whether the additional passes were made."""
        return "_errors" in self.__dict__

    @property
    def most(self) -> float:
        """The largest change of the norm of Jᵀ u by rounding."""
        return _MOST_ROUNDINGS * hypot(*self._errors.values())

    @cached_property
    def _errors(self) -> dict[Tensor, float]:
        """Autograd's error for each parameter: if u is a sum, Jᵀ u should be the sum of its parts.

        Passes for single objectives of all samples err like those of the engine. Random shares
        of u, which are not powers of two, make all products round differently.
        """
        u, sums = self._vector, []
        if (k := self._objectives.per_sample) > 1:
            each = self._objectives.cotangents()
            some = [each[i::_MOST_PASSES].sum(0) for i in range(min(k, _MOST_PASSES))]
            sums.append([u * x for x in some])
        generator = torch.Generator("cpu").manual_seed(0)
        for low, high in _SHARES:
            is_low = torch.randint(2, u.shape, generator=generator, device="cpu").bool()
            part = u * torch.where(is_low, low, high).to(u)
            sums.append([part, u - part])
        errors = [self._compare(1, summands) for summands in sums]
        return {p: max(each[p][0] for each in errors) for p in errors[0]}

    @cached_property
    def _of_halves(self) -> dict[Tensor, tuple[float, float]]:
        """Per parameter: how far -2 Jᵀ (-u / 2) is from Jᵀ u, with one pass for each half of B."""
        u, dim = -self._vector / 2, self._objectives.batch_dim
        if dim is None:
            return self._compare(-2, [u])
        sizes = [-1 if d == dim % u.dim() else 1 for d in range(u.dim())]
        is_even = (torch.arange(u.shape[dim], device=u.device) % 2 == 0).view(sizes)
        return self._compare(-2, [u * is_even, u * ~is_even])

    def _compare(
        self, factor: float, summands: Iterable[Tensor]
    ) -> dict[Tensor, tuple[float, float]]:
        """How far Jᵀ u is from a factor times the sum of some gradients, and the norms of these."""
        left = {p: x for p, x in self._gradients.items() if x is not None}
        sizes = dict.fromkeys(left, 0.0)
        for gradients in map(self._differentiate, summands):
            for parameter, gradient in gradients.items():
                if gradient is not None and parameter in left:
                    left[parameter] = difference_of(left[parameter], factor * gradient)
                    sizes[parameter] += norm(factor * gradient)
        return {p: (norm(x), sizes[p]) for p, x in left.items()}


def difference_of(first: Tensor, second: Tensor) -> Tensor:
    """The difference of two tensors of real numbers, in at least float32."""
    first, second = real_numbers(first), real_numbers(second)
    return first - second.to(first)


def tolerance(dtypes: Iterable[torch.dtype], nodes: Iterable[Any], *, is_cuda: bool) -> float:
    """The largest relative error of a right result of some nodes that use some dtypes.

    A sum of n numbers errs by about √n roundings, and no longer changes beyond n = 1 / ε: a
    right result may be off by √ε.
    """
    is_tf32 = is_cuda and may_be_tf32(nodes)
    return sqrt(max(_epsilon(dtype, is_tf32=is_tf32) for dtype in dtypes))


def _epsilon(dtype: torch.dtype, *, is_tf32: bool) -> float:
    """The distance from 1 to the next number of a dtype, or of TF32 products in it."""
    is_coarse = is_tf32 and dtype == torch.float32
    return _EPSILON_OF_TF32 if is_coarse else float(torch.finfo(dtype).eps)


def may_be_tf32(nodes: Iterable[Any]) -> bool:
    """Whether a GPU may have rounded factors in float32 to TF32 behind some nodes.

    By PyTorch's default, convolutions and recurrent layers do so, but matrix products do not.
    """
    backends: Any = torch.backends  # typed without these modules
    if backends.cuda.matmul.fp32_precision not in _EXACT:
        return True
    of_cudnn = backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision
    return not set(of_cudnn) <= _EXACT and any(map(_may_call_cudnn, nodes))


def _may_call_cudnn(node: Any) -> bool:
    """Whether a node is a convolution or a recurrent layer, or may hide one."""
    operation = kind_of_node(node.__class__).operation
    return operation.startswith(_BY_CUDNN) if operation else use_of(node) is None
