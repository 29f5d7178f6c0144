"""Rules of broadcast arithmetic.

With g the cotangent, and sums over the dimensions along which p is broadcast,

    y = x + a p    dp = a sum g             y = x p      dp = sum g x
    y = x / p      dp = sum -g x / p^2      y = p / x    dp = sum g / x
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from autogram.rules._recipe import Recipe, addend, broadcast, multilinear, product, promoted
from autogram.rules._registry import register_rule, variants


@register_rule(*variants("add", "add_"), holds_for_complex=True)
def add(input: Any, other: Any, *, alpha: float = 1) -> list[Recipe]:
    """``input + alpha * other``."""
    terms = [(x, scale) for x, scale in ((input, 1), (other, alpha)) if isinstance(x, Tensor)]
    shapes = [x.shape for x, _ in terms]
    return [addend(x, *shapes, scale=scale) for x, scale in terms]


@register_rule(*variants("sub", "sub_", "subtract", "subtract_"), holds_for_complex=True)
def sub(input: Any, other: Any, *, alpha: float = 1) -> list[Recipe]:
    """``input - alpha * other``."""
    return add(input, other, alpha=-alpha)


@register_rule(torch.rsub, holds_for_complex=True)
def rsub(input: Any, other: Any, *, alpha: float = 1) -> list[Recipe]:
    """``other - alpha * input``."""
    return add(other, input, alpha=-alpha)


@register_rule(*variants("mul", "mul_", "multiply", "multiply_"), holds_for_complex=True)
def mul(input: Any, other: Any) -> list[Recipe] | None:
    """``input * other``."""
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        return None
    output, (left, right) = broadcast(input.dim(), other.dim())
    return multilinear(output, (input, left), (other, right))


@register_rule(
    *variants("div", "div_", "true_divide", "true_divide_", "divide", "divide_"),
    holds_for_complex=True,
)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> list[Recipe] | None:
    """``input / other``, not rounded."""
    if rounding_mode or not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        return None
    return [
        addend(input, other.shape, saved=(other,), prepare=by_numerator),
        addend(other, input.shape, saved=(input, other), prepare=by_denominator),
    ]


@register_rule(torch.where, holds_for_complex=True)
def where(condition: Tensor, input: Any, other: Any) -> list[Recipe]:
    """``input`` where a condition holds, and ``other`` elsewhere."""
    branches = [(x, kept) for x, kept in ((input, True), (other, False)) if isinstance(x, Tensor)]
    shapes = condition.shape, *[x.shape for x, _ in branches]
    return [
        addend(x, *shapes, saved=(condition,), prepare=partial(_masked, kept))
        for x, kept in branches
    ]


@register_rule(torch.Tensor.where, holds_for_complex=True)
def where_method(input: Tensor, condition: Tensor, other: Any) -> list[Recipe]:
    """``input.where(condition, other)``."""
    return where(condition, input, other)


@register_rule(*variants("masked_fill", "masked_fill_"), holds_for_complex=True)
def masked_fill(input: Tensor, mask: Tensor, value: Any) -> list[Recipe]:
    """``value`` where a mask holds, and ``input`` elsewhere."""
    return where(mask, value, input)


@register_rule(torch.Tensor.__setitem__)
def setitem(tensor: Tensor, index: Any, value: Any) -> list[Recipe] | None:
    """The value set where a mask holds, in a tensor that is not a view."""
    is_masked = isinstance(index, Tensor) and index.dtype == torch.bool
    if not is_masked or not isinstance(value, Tensor) or tensor._base is not None:
        return None
    behind = tensor.dim() - index.dim()  # the mask covers the first dimensions
    if value.dim() > behind:
        return None  # one value per element, in order
    mask = index.view(*index.shape, *(1,) * behind)
    return [addend(value, tensor.shape, saved=(mask,), prepare=partial(_masked, True))]


@register_rule(torch.prelu)
def prelu(input: Tensor, weight: Tensor) -> list[Recipe]:
    """The slope: dw = sum g min(x, 0), per channel or over all of them."""
    output, _ = broadcast(input.dim())
    channel = "1" if weight.numel() == 1 else output[1:2]
    equation = f"{output},{output}->{channel if weight.dim() else ''}"
    return [product(weight, equation, input, prepare=negative_part)]


def by_numerator(*tensors: Tensor) -> tuple[Tensor]:
    """The cotangent of ``x / y`` times its derivative by ``x``."""
    cotangent, other = promoted(*tensors)
    return (cotangent / other.conj(),)


def by_denominator(*tensors: Tensor) -> tuple[Tensor]:
    """The cotangent of ``x / y`` times its derivative by ``y``."""
    cotangent, input, other = promoted(*tensors)
    return (cotangent * (-input / other.square()).conj(),)


def _masked(kept: bool, cotangent: Tensor, condition: Tensor) -> tuple[Tensor]:
    """The cotangent where the condition is ``kept``."""
    # Select, do not multiply: masked-out values may be infinite.
    return (torch.where(condition if kept else ~condition, cotangent, 0),)


def negative_part(cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    """The cotangent, and the input where it is below zero."""
    return cotangent, input.clamp(max=0)
