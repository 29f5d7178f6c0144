"""Nodes of normalisations: weight and bias, from the statistics that the node saved.

The input has no recipe, since its statistics depend on it. Statistics saved in half precision are
computed again, except for layer normalisations, which save no epsilon: their rows are as precise as
PyTorch's own gradient.
"""

from __future__ import annotations

from functools import lru_cache, partial

from torch import Tensor

from autogram.rules._nodes.registry import NodeInput, NodeRecipe, of_nodes
from autogram.rules._recipe import Formula, formula_of, positions, promoted
from autogram.rules.normalization import (
    blocks_by_group,
    by_batch,
    have_digits,
    standardize,
    weight_formula,
)

_SAVED = ("input", "result1", "result2")


@of_nodes("NativeLayerNorm")
def _layer_norm(read: NodeInput) -> NodeRecipe | None:
    """Elementwise weight and bias over the last dimensions."""
    return _affine(read, _last(read))


@of_nodes("FusedRmsNorm")
def _rms_norm(read: NodeInput) -> NodeRecipe | None:
    """Elementwise weight over the last dimensions."""
    formula = weight_formula(len(read.result), _last(read), _by_scale, ())
    return NodeRecipe(formula, ("input", "result1")) if read.position == 1 else None


@of_nodes("CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm")
def _batch_norm(read: NodeInput) -> NodeRecipe | None:
    """Weight and bias per channel, with statistics of the batch or running ones."""
    rank, channel = len(read.result), positions(2)[1]
    if read.position != 1:
        return _affine(read, channel)
    eps = read.number("eps" if read.has("eps") else "epsilon")
    if read.number("training"):
        return NodeRecipe(_of_batch(rank, channel, eps), _SAVED)
    formula = weight_formula(rank, channel, standardize, (("eps", eps),))
    return NodeRecipe(formula, ("input", "running_mean", "running_var"))


@of_nodes("NativeGroupNorm", gives_several=True)
def _group_norm(read: NodeInput) -> NodeRecipe | None:
    """Weight and bias per channel, with statistics of each group of channels of a sample.

    One kernel computes the rows of both.
    """
    dims, are_read = positions(len(read.result)), (1 in read.positions, 2 in read.positions)
    if read.positions == (2,):
        return NodeRecipe(formula_of(f"{dims}->{dims[1]}"))
    if sum(are_read) < len(read.positions):
        return None
    return NodeRecipe(_of_groups(dims, read.number("group"), read.number("eps"), *are_read), _SAVED)


def _last(read: NodeInput) -> str:
    """The indices of the last dimensions, which are normalised."""
    return positions(len(read.result))[-len(read.number("normalized_shape")) :]


def _affine(read: NodeInput, target: str) -> NodeRecipe | None:
    """The recipe of a weight or a bias, with mean and inverse deviation of the last dimensions."""
    if read.position == 0:
        return None
    rank = len(read.result)
    if read.position == 2:
        return NodeRecipe(formula_of(f"{positions(rank)}->{target}"))
    return NodeRecipe(weight_formula(rank, target, _by_statistics, ()), _SAVED)


def _by_statistics(input: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """x^ of a normalisation with a mean."""
    return (input - mean) * inverse


def _by_scale(input: Tensor, inverse: Tensor) -> Tensor:
    """x^ of a normalisation without a mean."""
    return input * inverse


@lru_cache(maxsize=4096)
def _of_batch(dims: int, channel: str, eps: float) -> Formula:
    output = positions(dims)
    equation = f"{output},{output}->{channel}"
    return formula_of.__wrapped__(equation, prepare=partial(_normalized_by_batch, eps))


def _normalized_by_batch(
    eps: float, cotangent: Tensor, input: Tensor, *statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """The cotangent and x^, with the saved statistics where these are precise enough."""
    if not have_digits(*statistics):
        return cotangent, by_batch(*promoted(input), eps=eps)
    shape = (1, -1) + (1,) * (input.dim() - 2)
    input, mean, inverse = promoted(input, *statistics)
    return cotangent, (input - mean.view(shape)) * inverse.view(shape)


@lru_cache(maxsize=4096)
def _of_groups(dims: str, groups: int, eps: float, has_weight: bool, has_bias: bool) -> Formula:
    return Formula(dims, partial(blocks_by_group, dims, groups, eps, has_weight, has_bias))
