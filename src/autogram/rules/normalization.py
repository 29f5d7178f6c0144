"""Rules of the affine part of normalisations: y = w x^ + c, with x^ the normalised input.

    dw = sum g x^        dc = sum g

x^ is computed again from the saved input, because dividing the output by ``w`` fails at zero.
Statistics that mix the samples (batch normalisation in training mode) are noticed when layouts of
earlier uses are inferred. A rule that fits ``F`` and ``torch`` is registered for both, because
recording the calls inside a Python function takes longer than recording the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import compress
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._blocks import Block, Layout, block_of_equation, joined, rows_block
from autogram.rules._recipe import (
    Formula,
    Recipe,
    are_numbers,
    formula_of,
    positions,
    promoted,
)
from autogram.rules._registry import register_rule


@register_rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001 - the signature of the torch function
) -> list[Recipe]:
    """Elementwise weight and bias over the last dimensions."""
    target, shape = positions(input.dim())[-len(normalized_shape) :], tuple(normalized_shape)
    return _affine(input, weight, bias, target, F.layer_norm, normalized_shape=shape, eps=eps)


@register_rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> list[Recipe]:
    """Elementwise weight over the last dimensions."""
    target, shape = positions(input.dim())[-len(normalized_shape) :], tuple(normalized_shape)
    return _affine(input, weight, None, target, F.rms_norm, normalized_shape=shape, eps=eps)


@register_rule(F.group_norm, torch.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001 - the signature of the torch function
) -> list[Recipe]:
    """Weight and bias per channel, with statistics of each group of channels of a sample."""
    dims = positions(input.dim())
    blocks = partial(blocks_by_group, dims, num_groups, eps, weight is not None, bias is not None)
    operands = tuple([x for x in (weight, bias) if x is not None])
    recipe = Recipe(operands, Formula(dims, blocks), (input,), from_result=_kept_by_group_norm)
    return [recipe]


@register_rule(torch.instance_norm)
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,  # noqa: ARG001 - the signature of the torch function
) -> list[Recipe]:
    """Weight and bias per channel, with statistics of each sample or running ones."""
    if use_input_stats or running_mean is None or running_var is None:
        return group_norm(input, input.shape[1], weight, bias, eps)
    return batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)


@register_rule(torch.batch_norm)
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,  # noqa: ARG001 - the signature of the torch function
    eps: float,
    cudnn_enabled: bool = True,  # noqa: ARG001
) -> list[Recipe]:
    """Weight and bias per channel, with statistics of the batch or running ones."""
    channel = positions(2)[1]
    if training or running_mean is None or running_var is None:
        return _affine(input, weight, bias, channel, by_batch, eps=eps)
    # Copies, because the next forward pass in training mode changes the statistics in place.
    statistics = (running_mean.clone(), running_var.clone())
    return _affine(input, weight, bias, channel, standardize, *statistics, eps=eps)


@lru_cache(maxsize=4096)
def weight_formula(
    dims: int, target: str, normalize: Callable[..., Tensor], options: tuple[Any, ...]
) -> Formula:
    """The formula of a weight: the cotangent times x^."""
    output, prepare = positions(dims), partial(_normalized, partial(normalize, **dict(options)))
    return formula_of.__wrapped__(f"{output},{output}->{target}", prepare=prepare)


def _affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: str,
    normalize: Callable[..., Tensor],
    *statistics: Tensor,
    normalized_shape: tuple[int, ...] = (),
    eps: float | None,
) -> list[Recipe]:
    """Recipes of a weight and a bias with the indices ``target``."""
    dims, recipes = input.dim(), []
    if weight is not None:
        shape = (("normalized_shape", normalized_shape),) if normalized_shape else ()
        make = weight_formula if are_numbers(eps, *normalized_shape) else weight_formula.__wrapped__
        formula = make(dims, target, normalize, (*shape, ("eps", eps)))
        recipes.append(Recipe((weight,), formula, (input, *statistics)))
    if bias is not None:
        recipes.append(Recipe((bias,), formula_of(f"{positions(dims)}->{target}")))
    return recipes


def _normalized(
    normalize: Callable[..., Tensor], cotangent: Tensor, *saved: Tensor
) -> tuple[Tensor, Tensor]:
    """The cotangent and x^, from the input and optional statistics."""
    return cotangent, normalize(*promoted(*saved))


def by_batch(input: Tensor, *, eps: float) -> Tensor:
    """x^ with statistics of the batch, even if each channel has only a single value."""
    # `F.batch_norm` refuses a single value, which `torch.batch_norm` takes.
    is_enabled = torch.backends.cudnn.enabled
    return torch.batch_norm(input, None, None, None, None, True, 0.0, eps, is_enabled)


def standardize(input: Tensor, mean: Tensor, variance: Tensor, *, eps: float) -> Tensor:
    """x^ with given statistics of each channel."""
    shape = (1, -1) + (1,) * (input.dim() - 2)
    return (input - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)


def _kept_by_group_norm(result: Tensor) -> tuple[Tensor, ...] | None:
    """The input as the kernel read it, and mean and inverse deviation of each group."""
    node: Any = result.grad_fn
    if type(node).__name__ != "NativeGroupNormBackward0":
        return None
    kept: tuple[Tensor, ...] = node._saved_input, node._saved_result1, node._saved_result2
    return kept if have_digits(*kept[1:]) else None


def have_digits(*statistics: Tensor) -> bool:
    """Whether saved statistics are precise enough for rows."""
    return all(x.dtype in (torch.float32, torch.float64) for x in statistics)


def blocks_by_group(
    dims: str,
    groups: int,
    eps: float,
    has_weight: bool,
    has_bias: bool,
    layout: Layout | None,
    cotangent: Tensor,
    input: Tensor,
    *statistics: Tensor,
) -> Iterator[Block]:
    """The existing blocks among weight and bias, with statistics of each group.

    PyTorch's kernel for ``dw = (sum g x - mean sum g) / deviation`` and ``dc = sum g`` reads the
    cotangent g and the input x once, and does not compute x^.
    """
    if not have_digits(*statistics):
        statistics = ()
    cotangent, input = promoted(cotangent, input)
    is_plain = layout is not None and not (layout.dim or layout.has_before or layout.has_after)
    if is_plain and input.is_contiguous() and cotangent.is_contiguous() and input.numel():
        grouped = _rows(cotangent, input, groups, eps, *statistics)
        blocks = [rows_block(rows) for rows in grouped]
    else:
        normalized = torch.group_norm(input, groups, eps=eps)
        blocks = [
            block_of_equation(f"{dims},{dims}->{dims[1]}", dims, layout, cotangent, normalized),
            block_of_equation(f"{dims}->{dims[1]}", dims, layout, cotangent),
        ]
    return compress(blocks, (has_weight, has_bias))


def _rows(
    cotangent: Tensor, input: Tensor, groups: int, eps: float, *statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """The rows of weight and bias, ``(k, b, c)`` each, by the backward kernel of group norm.

    The kernel adds up the rows of all samples. It is therefore given one sample with all channels.
    """
    n, c, area = *input.shape[:2], prod(input.shape[2:])
    if not statistics:
        statistics = torch.native_group_norm(input, None, None, n, c, area, groups, eps)[1:]
    mean, inverse = (x.view(1, n * groups) for x in promoted(input, *statistics)[1:])
    x = input.view(1, n * c, area)
    weight = input.new_empty(n * c)  # only the gradient of the input would read it
    parts = [
        torch.ops.aten.native_group_norm_backward(
            *(g.view(1, n * c, area), x, mean, inverse, weight),
            *(1, n * c, area, n * groups, [False, True, True]),
        )
        for g in cotangent
    ]
    of_weight, of_bias = (joined(rows) for rows in list(zip(*parts, strict=True))[1:])
    return of_weight.view(-1, n, c), of_bias.view(-1, n, c)
