"""Places behind element-wise functions, reductions, losses and layers of neural networks."""

from __future__ import annotations

import re
from math import prod

from autogram._capture.places.places import Places
from autogram._capture.places.transfers.step import (
    NodeStep,
    across,
    all_together,
    by_element,
    by_input,
    inserted,
    leading,
    only,
    reduced,
    table,
)


def _multiplied(step: NodeStep, places: Places) -> Places:
    """Element by element; zeros of a constant factor may keep samples apart."""
    if step.is_voting:
        factor = step.constant("self" if step.position else "other")
        if factor is not None:
            places = places.emptied(factor == 0)
    return by_element(step, places)


def _chosen(step: NodeStep, places: Places) -> Places:
    """Element by element, for one of the two inputs between which a condition chooses."""
    if step.is_voting:
        condition = step.saved("condition")
        places = places.emptied(condition if step.position else ~condition)
    return by_element(step, places)


def _masked(step: NodeStep, places: Places) -> Places:
    """Element by element, except where the mask fills in another value."""
    if step.is_voting and step.position == 0:
        places = places.emptied(step.saved("mask"))
    return by_element(step, places)


ELEMENTWISE = by_element, _multiplied, _chosen, _masked


def _layer_normalized(step: NodeStep, places: Places) -> Places:
    """Keeps the dimensions before the normalised ones; a weight adds up places along them."""
    if step.position:
        return places.summed(step.given)
    return leading(len(step.argument("normalized_shape")))(step, places)


def _layer_normalized_again(step: NodeStep, places: Places) -> Places:
    """The derivative of a layer normalisation; its first result is for its input."""
    if step.number or step.result != step.given:
        return all_together(step, places)
    return leading(len(step.argument("normalized_shape")))(step, places)


def _of_groups(groups: int, step: NodeStep, places: Places) -> Places:
    """Keeps the first dimension, and groups of channels in the second, which do not meet."""
    result, given = step.result, step.given
    if groups < 2 or len(result) < 2 or result[1] % groups or given[1] % groups:
        return leading(len(given) - 1)(step, places)
    places = places.viewed((result[0], groups, prod(result[1:]) // groups)).merged([2])
    return places.resized(2, prod(given[1:]) // groups).viewed(given)


def _convolved(step: NodeStep, places: Places) -> Places:
    """Keeps images, and groups of channels; weight and bias follow channels of the result."""
    if step.position == 0:
        is_batched = len(step.result) == len(step.given)
        if is_batched:
            return _of_groups(step.argument("groups"), step, places)
        return all_together(step, places)
    if step.position == 1 and step.has("transposed") and step.argument("transposed"):
        return all_together(step, places)
    return only(1, 0)(step, places)


def _group_normalized(step: NodeStep, places: Places) -> Places:
    """Keeps images, and groups of channels; weight and bias follow channels."""
    if step.position:
        return only(1, 0)(step, places)
    return _of_groups(step.argument("group"), step, places)


def _batch_normalized(step: NodeStep, places: Places) -> Places:
    """In training, keeps channels, in which all samples meet."""
    if step.position:
        return only(1, 0)(step, places)
    return only(1, 1)(step, places) if step.argument("training") else places


OF_LAYERS = table(
    (
        by_element,  # operations that PyTorch does not tag
        """
        Alias BinaryCrossEntropy BinaryCrossEntropyBackward BinaryCrossEntropyWithLogits Clone
        Complex Conj Expand FusedDropout Hardswish HuberLoss LogSigmoid LogSigmoidBackward MseLoss
        MseLossBackward NativeDropout NativeDropoutBackward Polar PreluKernel RreluWithNoise
        SmoothL1Loss SmoothL1LossBackward SoftMarginLoss SpecialI0E SpecialI1E SpecialXlog1Py
        SparseMask ToCopy Tril Triu
        """,
    ),
    (_multiplied, "Mul"),
    (_chosen, "Where"),
    (_masked, "MaskedFill"),
    (
        reduced,
        """
        Amax Amin Aminmax LinalgVectorNorm Logsumexp Mean Nansum Norm Prod Std StdMean Sum Var
        VarMean
        """,
    ),
    (
        across,
        """
        Cumprod Cumsum FftC2C FftC2R FftR2C Glu LinalgCross LogSoftmax LogSoftmaxBackwardData
        Logcumsumexp SafeSoftmax Softmax SoftmaxBackwardData SparseLogSoftmax SparseSoftmax
        """,
    ),
    (inserted(1), "MultiMarginLoss MultilabelMarginLoss NllLoss NllLoss2D"),
    (inserted(0, 2), "CtcLoss"),
    (_layer_normalized, "FusedRmsNorm NativeLayerNorm"),
    (_layer_normalized_again, "NativeLayerNormBackward"),
    (_batch_normalized, "CudnnBatchNorm MiopenBatchNorm NativeBatchNorm"),
    (_group_normalized, "NativeGroupNorm"),
    (_convolved, "ConvDepthwise2D Convolution ConvolutionOverrideable SlowConv2D SlowConv3D"),
    (by_input(only(0, 0), only(0, 0)), "ConvolutionBackward"),
    (
        only(0, 0),
        "AffineGridGenerator Col2Im CudnnGridSampler GridSampler2D GridSampler3D Im2Col",
    ),
    (by_input(leading(1), leading(1), leading(1)), "ThnnFusedGruCell ThnnFusedLstmCell"),
    # In layers, time comes first and samples second; states have samples before their features.
    (by_input(only(-2, -2), *[all_together] * 4, only(-2, -2), only(-2, -2)), "MkldnnRnnLayer"),
)

FAMILIES_OF_LAYERS = tuple(
    (re.compile(rf".*([Pp]ool|Upsample|Pad|Interp)\w*{rank}D.*"), leading(rank))
    for rank in (1, 2, 3)
)
