"""Rules of the affine part of normalisations: y = w x^ + c, with x^ the normalised input.

    dw = sum g x^        dc = sum g

x^ is computed again from the saved input, because dividing the output by ``w`` fails at zero. What
the statistics are taken over does not matter here: x^ is a constant to ``w``. Statistics that mix
the samples (batch normalisation in training mode) show upstream, where the layout is sought.

The functions of ``F`` call those of ``torch``. Where a rule fits both, it is registered for both:
recording what is inside of a Python function takes longer than recording the function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._blocks import Block, Layout, assemble
from autogram.rules._recipe import JointRecipe, Prepare, Recipe, positions, product
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
    shape = tuple(normalized_shape)
    normalize = partial(_layer_norm, shape, eps)
    return _affine(input, weight, bias, positions(input.dim())[-len(shape) :], normalize)


@register_rule(F.rms_norm, torch.rms_norm)
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


@register_rule(F.group_norm, torch.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001 - the signature of the torch function
) -> list[JointRecipe]:
    """Weight and bias per channel."""
    return _by_group(input, num_groups, weight, bias, eps)


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
) -> list[Recipe] | list[JointRecipe]:
    """Weight and bias per channel, with statistics of each sample or running ones."""
    if use_input_stats or running_mean is None or running_var is None:
        return _by_group(input, input.shape[1], weight, bias, eps)
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


def _by_group(
    input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> list[JointRecipe]:
    """The recipe of a weight and a bias per channel, with statistics of each group of channels."""
    operands = tuple(x for x in (weight, bias) if x is not None)
    form = PerChannel(positions(input.dim()), groups, eps, weight is not None, bias is not None)
    return [JointRecipe(operands, form, (input,))]


@dataclass(frozen=True)
class PerChannel:
    """The form of a weight and a bias per channel, with statistics of each group of channels.

    With mean and deviation of its group, the row of a sample is

        dw = (sum g x - mean sum g) / deviation        dc = sum g

    Group normalisation has a kernel for these sums, which reads g and x once and computes no
    x^. It adds up the rows of all samples; here their channels are made those of one sample.
    """

    dims: str
    groups: int
    eps: float
    has_weight: bool
    has_bias: bool

    def blocks(self, layout: Layout | None, cotangent: Tensor, *saved: Tensor) -> Iterator[Block]:
        """The blocks of the weight and of the bias, as far as there are both.

        From the cotangent ``(k, *output)`` and the input, both ``(n, c, ...)`` behind ``k``.
        """
        (input,) = saved
        are_samples = layout is not None and not (
            layout.dim or layout.has_before or layout.has_after
        )
        if are_samples and input.is_contiguous() and cotangent.is_contiguous() and input.numel():
            found = self._sums(cotangent, input)
            blocks = [Block("kbx->kbx", (rows,)) for rows in found]
        else:
            normed = torch.group_norm(input, self.groups, eps=self.eps)
            of, channel = self.dims, self.dims[1]
            blocks = [
                assemble(f"{of},{of}->{channel}", of, layout, cotangent, normed),
                assemble(f"{of}->{channel}", of, layout, cotangent),
            ]
        yield from (
            x for x, has in zip(blocks, (self.has_weight, self.has_bias), strict=True) if has
        )

    def _sums(self, cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of weight and bias, ``(k, b, c)`` each."""
        n, c, area, groups = *input.shape[:2], prod(input.shape[2:]), self.groups
        _, *statistics = torch.native_group_norm(input, None, None, n, c, area, groups, self.eps)
        mean, inverse = (x.view(1, n * groups) for x in statistics)
        x, ones = input.view(1, n * c, area), input.new_ones(n * c)
        parts = [
            torch.ops.aten.native_group_norm_backward(
                *(g.view(1, n * c, area), x, mean, inverse, ones),
                *(1, n * c, area, n * groups, [False, True, True]),
            )
            for g in cotangent
        ]
        of_weight, of_bias = (torch.stack(rows) for rows in list(zip(*parts, strict=True))[1:])
        return of_weight.view(-1, n, c), of_bias.view(-1, n, c)


def _layer_norm(
    shape: tuple[int, ...], eps: float, cotangent: Tensor, input: Tensor
) -> tuple[Tensor, Tensor]:
    return cotangent, F.layer_norm(input, shape, eps=eps)


def _rms_norm(
    shape: tuple[int, ...], eps: float | None, cotangent: Tensor, input: Tensor
) -> tuple[Tensor, Tensor]:
    return cotangent, F.rms_norm(input, shape, eps=eps)


# `F.batch_norm` refuses a single value for each channel, which that of `torch` takes.


def _batch_norm(eps: float, cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    is_enabled = torch.backends.cudnn.enabled
    normed = torch.batch_norm(input, None, None, None, None, True, 0.0, eps, is_enabled)
    return cotangent, normed


def _standardize(
    eps: float, cotangent: Tensor, input: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    shape = (1, -1) + (1,) * (input.dim() - 2)
    return cotangent, (input - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)
