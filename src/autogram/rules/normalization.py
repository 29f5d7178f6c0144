"""Rules of the affine part of normalisations: y = w x^ + c, with x^ the normalised input.

    dw = sum g x^        dc = sum g

x^ is computed again from the saved input, because dividing the output by ``w`` fails at zero. What
the statistics are taken over does not matter here: x^ is a constant to ``w``. Statistics that mix
the samples (batch normalisation in training mode) show upstream, where the layout is sought.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram.rules._recipe import Prepare, Recipe, positions, product
from autogram.rules._registry import register_rule


@register_rule(torch.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001 - the signature of the torch function
) -> list[Recipe]:
    """Elementwise weight and bias over the last dimensions."""
    shape = tuple(normalized_shape)
    normalize = partial(_layer_norm, shape, eps)
    return _affine(input, weight, bias, positions(input.dim())[-len(shape) :], normalize)


@register_rule(torch.rms_norm)
def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> list[Recipe]:
    """Elementwise weight over the last dimensions."""
    shape = tuple(normalized_shape)
    normalize = partial(_rms_norm, shape, eps)
    return _affine(input, weight, None, positions(input.dim())[-len(shape) :], normalize)


@register_rule(torch.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001 - the signature of the torch function
) -> list[Recipe]:
    """Weight and bias per channel."""
    normalize = partial(_group_norm, num_groups, eps)
    return _affine(input, weight, bias, positions(2)[1], normalize)


@register_rule(torch.instance_norm)
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,  # noqa: ARG001 - the signature of the torch function
    eps: float,
    cudnn_enabled: bool = True,  # noqa: ARG001
) -> list[Recipe]:
    """Weight and bias per channel, with statistics of each sample or running ones."""
    if use_input_stats or running_mean is None or running_var is None:
        return _affine(input, weight, bias, positions(2)[1], partial(_instance_norm, eps))
    statistics = (running_mean.clone(), running_var.clone())
    normalize = partial(_standardize, eps)
    return _affine(input, weight, bias, positions(2)[1], normalize, *statistics)


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
    if training or running_mean is None or running_var is None:
        return _affine(input, weight, bias, positions(2)[1], partial(_batch_norm, eps))
    # Copies, because the next forward pass in training mode changes the statistics in place.
    statistics = (running_mean.clone(), running_var.clone())
    normalize = partial(_standardize, eps)
    return _affine(input, weight, bias, positions(2)[1], normalize, *statistics)


def _affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: str,
    normalize: Prepare,
    *statistics: Tensor,
) -> list[Recipe]:
    """Recipes of a weight and a bias with the indices ``target``."""
    output = positions(input.dim())
    recipes = []
    if weight is not None and weight.requires_grad:
        equation = f"{output},{output}->{target}"
        recipes.append(product(weight, equation, input, *statistics, prepare=normalize))
    if bias is not None and bias.requires_grad:
        recipes.append(product(bias, f"{output}->{target}"))
    return recipes


def _layer_norm(
    shape: tuple[int, ...], eps: float, cotangent: Tensor, input: Tensor
) -> tuple[Tensor, Tensor]:
    return cotangent, F.layer_norm(input, shape, eps=eps)


def _rms_norm(
    shape: tuple[int, ...], eps: float | None, cotangent: Tensor, input: Tensor
) -> tuple[Tensor, Tensor]:
    return cotangent, F.rms_norm(input, shape, eps=eps)


# The functions of `F` refuse a single value for each channel, which those of `torch` take.


def _group_norm(groups: int, eps: float, cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    return cotangent, torch.group_norm(input, groups, eps=eps)


def _instance_norm(eps: float, cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    is_enabled = torch.backends.cudnn.enabled
    normed = torch.instance_norm(input, None, None, None, None, True, 0.0, eps, is_enabled)
    return cotangent, normed


def _batch_norm(eps: float, cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    is_enabled = torch.backends.cudnn.enabled
    normed = torch.batch_norm(input, None, None, None, None, True, 0.0, eps, is_enabled)
    return cotangent, normed


def _standardize(
    eps: float, cotangent: Tensor, input: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    shape = (1, -1) + (1,) * (input.dim() - 2)
    return cotangent, (input - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)
