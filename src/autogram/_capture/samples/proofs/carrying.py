"""Carrying: which nodes of autograd's graph keep samples apart whatever the values are.

In the backward pass, a node computes the cotangents of its inputs from the cotangent of its result.
Samples that lie along some dimension of the result stay apart, and in order, in one of two cases:

- The node *carries* this dimension: an element-wise product carries all dimensions, a softmax all
  but its own, a matrix product the rows of its first factor. Then no value can move a sample.
- The values happen to keep the samples apart: a mask that selects the tokens of a sample, a
  permutation that is the identity, a matrix of weights that is block-diagonal.

The table here has the nodes of the first case. Any other node counts as the second case, so that a
node that is missing here costs time, and results stay exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._capture.autograd.graph import kind_of_node
from autogram._capture.autograd.slices import (
    changed_slice,
    is_pointwise,
    kept_by_slice,
    kept_dims,
)
from autogram._capture.places.transfers.step import signed

Shape = tuple[int, ...]


class Crossing(NamedTuple):
    """A path through a node, from a result of some shape to the input with a number and a shape."""

    node: Any
    position: int
    result: Shape
    given: Shape


# Gives the dimensions of the result that a node carries to the input, for an edge.
Carries = Callable[[Crossing], Iterable[int]]


def carried(edge: Crossing) -> set[int]:
    """The dimensions of a node's result that it carries to one of its inputs."""
    find = _find(kind_of_node(edge.node.__class__).operation)
    try:
        return set() if find is None else set(find(edge))
    except AttributeError:  # a field that nodes of this version of PyTorch do not have
        return set()


def is_elementwise(node: Any) -> bool:
    """Whether a node gives inputs of its result's shape multiples of the cotangent in its place."""
    return _find(kind_of_node(node.__class__).operation) is _aligned


def is_packed(saved: Any) -> bool:
    """Whether reading a raw field runs a hook, which may compute a part of the model again."""
    entries = saved if isinstance(saved, (tuple, list)) else (saved,)
    return any(getattr(entry, "unpack_hook", None) is not None for entry in entries)


def _all(edge: Crossing) -> Iterable[int]:
    """Every dimension."""
    return range(len(edge.result))


def _aligned(edge: Crossing) -> Iterable[int]:
    """The dimensions along which the input was not broadcast."""
    result, given = edge.result, edge.given
    missing = len(result) - len(given)
    return [d for d in range(max(missing, 0), len(result)) if result[d] == given[d - missing]]


def _of_first(carries: Carries, others: Carries = lambda _: (), count: int = 1) -> Carries:
    """Different dimensions for some first inputs and for the others, by default none."""
    return lambda edge: (carries if edge.position < count else others)(edge)


def _but_normalized(edge: Crossing) -> Iterable[int]:
    """The dimensions in front of those that are normalised."""
    return range(len(edge.result) - len(edge.node._saved_normalized_shape))


def _leading(but: int) -> Carries:
    """The first dimensions, all but some last ones, where result and input have equal sizes."""

    def find(edge: Crossing) -> Iterable[int]:
        count = len(edge.given) - but if len(edge.given) == len(edge.result) else 0
        return [d for d in _aligned(edge) if d < count]

    return find


def _stack(edge: Crossing) -> Iterable[int]:
    """For functions of a stack of matrices: the dimensions in front of the matrices."""
    rank = len(edge.given) - 2
    is_stack = rank <= len(edge.result) <= rank + 2 and edge.result[:rank] == edge.given[:rank]
    return range(rank if is_stack else 0)


def _batch(edge: Crossing) -> Iterable[int]:
    """The first dimension."""
    return (0,) if edge.result[:1] == edge.given[:1] else ()


def _but_own(edge: Crossing) -> Iterable[int]:
    """All dimensions but the ``dim``, ``dims`` or ``dimension`` of the call."""
    node, rank = edge.node, len(edge.given)
    name = next((x for x in ("dim", "dimension") if hasattr(node, f"_saved_{x}")), "dims")
    dims = getattr(node, f"_saved_{name}")
    own = {wrapped(d, rank) for d in (dims if isinstance(dims, tuple) else (dims,))}
    return [d for d in range(min(len(edge.result), rank)) if d not in own]


def _joined(edge: Crossing) -> Iterable[int]:
    """All dimensions, but the one along which tensors are joined if constants are among them.

    The node does not tell how long constants are, and so not where the other tensors lie.
    """
    has_constants = any(following is None for following, _ in edge.node.next_functions)
    return _but_own(edge) if has_constants else _all(edge)


def _matrices(first: int) -> Carries:
    """The stack, rows of the left matrix (which is input ``first``), columns of the right one."""

    def find(edge: Crossing) -> Iterable[int]:
        own = edge.position - first  # negative for the tensor that is added
        stack = range(len(edge.result) - 2)
        return [*stack, len(stack) + own] if own >= 0 else _aligned(edge)

    return find


def _put(edge: Crossing) -> Iterable[int]:
    """For the ``y`` of ``x[indices] = y``: the dimensions that ``x[indices]`` carries."""
    result, given, front = edge.result, edge.given, _in_front(edge.node)
    is_whole = front and len(given) == rank_of_indexed(edge.node, len(result))
    return [d for d in range(front) if is_whole and given[d] == result[d]]


def rank_of_indexed(node: Any, rank: int) -> int:
    """The number of dimensions of ``x[indices]``, for a node that saved the indices."""
    taken = [x for x in node._saved_indices if x is not None]
    are_masks = [x.dtype in (torch.bool, torch.uint8) for x in taken]
    pairs = list(zip(taken, are_masks, strict=True))
    replaced = sum(x.dim() if is_mask else 1 for x, is_mask in pairs)
    added = max(1 if is_mask else x.dim() for x, is_mask in pairs)
    return rank - replaced + added


def _in_front(node: Any) -> int:
    """How many dimensions are in front of indexed ones; 0 where indexed ones are moved there."""
    if is_packed(node._raw_saved_indices):
        return 0
    indexed = [dim for dim, index in enumerate(node._saved_indices) if index is not None]
    return indexed[0] if len(indexed) == indexed[-1] - indexed[0] + 1 else 0


def _restrided(edge: Crossing) -> Iterable[int]:
    """The dimensions that a view by ``as_strided`` keeps.

    All dimensions for ``as_strided_``, by which pooling of images sets strides.
    """
    is_in_place = type(edge.node).__name__ == "AsStridedBackward1"
    if is_in_place and edge.result == edge.given:
        return _all(edge)
    return [dim for dim, _ in kept_dims(edge.node)]


def _changed(edge: Crossing) -> Iterable[int]:
    """Where a slice was changed by an element-wise call: all dimensions of the whole tensor.

    And of what the slice was changed by, those that the slice has in order.
    """
    found = changed_slice(edge.node)
    if found is None:
        return ()
    if edge.position == 0:
        return _all(edge)
    sizes = found.part.shape
    missing = len(sizes) - len(edge.given)
    kept = [(d, of) for d, of in enumerate(kept_by_slice(found)) if of >= max(missing, 0)]
    return [d for d, of in kept if edge.given[of - missing] == sizes[of]]


def _trilinear(edge: Crossing) -> Iterable[int]:
    """The first dimension, as long as no factor is expanded and nothing is summed along it."""
    expanded = getattr(edge.node, f"_saved_expand{edge.position + 1}")
    return () if 0 in (*expanded, *edge.node._saved_sumdim) else (0,)


def wrapped(dim: int, rank: int) -> int:
    """A dimension that may be negative."""
    return signed(dim) % max(rank, 1)


# Operations, by the dimensions that they carry. A reduction carries all dimensions of its result.
_KNOWN: list[tuple[Carries, str]] = [
    (
        _all,
        """
        Transpose T Permute Squeeze Unsqueeze Select Slice Alias Unbind Split SplitWithSizes
        UnsafeSplit UnsafeSplitWithSizes Stack ToCopy Diagonal DiagEmbed ConstantPadNd
        SelectBackward SliceBackward DiagonalBackward
        ViewAsComplex Tril Triu Conj Sum Nansum Mean Max Min Median Nanmedian Amax Amin Aminmax
        Norm LinalgVectorNorm Var Std VarMean StdMean Logsumexp Prod Kthvalue Mode NllLoss
        NllLoss2D CtcLoss MultiMarginLoss MultilabelMarginLoss
        """,
    ),
    (
        _aligned,  # element-wise operations that have no tag of PyTorch's, and broadcasts
        """
        Expand Repeat CopyBackwards Fill NativeDropout FusedDropout PreluKernel RreluWithNoise
        LogSigmoid Hardswish Complex Polar MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy
        BinaryCrossEntropyWithLogits SoftMarginLoss SpecialI0E SpecialI1E SpecialXlog1Py
        """,
    ),
    (
        _but_own,
        """
        Gather Topk Sort Cummax Cummin Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Logcumsumexp
        IndexSelect Glu LinalgCross FftR2C FftC2R FftC2C Flip Rot90 Unfold
        """,
    ),
    # Without dimensions, all elements are rolled as one row.
    (lambda edge: _but_own(edge) if edge.node._saved_dims else (), "Roll"),
    (_joined, "Cat"),
    (lambda edge: _all(edge) if len(edge.node._input_metadata) == 1 else (), "HandOn"),
    (_of_first(_all, _but_own), "Scatter ScatterAdd ScatterReduce IndexAdd IndexCopy IndexReduce"),
    (_of_first(_all), "IndexFill MaskedScatter"),
    (
        _of_first(_but_normalized),
        "NativeLayerNorm FusedRmsNorm",
    ),
    # Of functions that are differentiated again, the first two inputs have the samples.
    (_of_first(_but_normalized, count=2), "NativeLayerNormBackward"),
    (_of_first(_but_own, count=2), "SoftmaxBackwardData LogSoftmaxBackwardData GluBackward"),
    (
        _of_first(lambda edge: (1,) if edge.node._saved_training else _all(edge)),  # the channels
        "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm",
    ),
    (_of_first(_batch), "NativeGroupNorm Convolution ConvolutionOverrideable Im2Col Col2Im"),
    (_batch, "AffineGridGenerator PixelShuffle PixelUnshuffle ChannelShuffle"),
    (_leading(4), "GridSampler3D"),
    (_leading(3), "GridSampler2D CudnnGridSampler"),
    # In layers, the samples are in one of the first two dimensions, and time is in the other.
    (_leading(1), "ThnnFusedLstmCell ThnnFusedGruCell MkldnnRnnLayer CudnnRnn MiopenRnn"),
    (lambda edge: range(len(edge.result) - 1), "ViewAsReal"),
    (_restrided, "AsStrided"),
    (_changed, "CopySlices"),
    (_matrices(0), "Mm Bmm"),
    (_matrices(1), "Addmm Baddbmm"),
    (_of_first(_all), "Mv"),  # the rows of the matrix
    # The rows of a matrix, each of which is multiplied by one matrix of a stack.
    (_of_first(lambda e: (0,) if len(e.given) == len(e.result) == 2 else ()), "GroupedMm"),
    # The stack, and the rows of one of two matrices, whose distances to the other's are known.
    (lambda e: [*_leading(2)(e), len(e.result) - 2 + e.position], "Cdist EuclideanDist"),
    (lambda edge: range(_in_front(edge.node)), "Index"),
    (_of_first(_all, _put), "IndexPut IndexPutImpl"),
    (_trilinear, "Trilinear"),
]
_TABLE = {name: carries for carries, names in _KNOWN for name in names.split()}
_FAMILIES: list[tuple[re.Pattern[str], Carries]] = [
    (re.compile(r"ScaledDotProduct.*"), _leading(2)),
    (re.compile(r"Linalg.*|TriangularSolve|Cholesky.*|MatrixExp"), _stack),
    *((re.compile(rf".*([Pp]ool|Upsample|Pad|Interp)\w*{n}D.*"), _leading(n)) for n in (1, 2, 3)),
]


@lru_cache(maxsize=4096)
def _find(operation: str) -> Carries | None:
    """What an operation carries: from the table, by a tag of PyTorch's, or as its family does."""
    if operation in _TABLE:
        return _TABLE[operation]
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operation)
    if is_pointwise(name.lower()) or is_pointwise(operation.lower()):  # as `log1p` is written
        return _aligned
    differentiated = operation.removesuffix("Backward")
    if differentiated != operation and _find(differentiated) is _aligned:
        return _aligned  # the derivative of an element-wise function is one
    return next((find for family, find in _FAMILIES if family.fullmatch(operation)), None)


def runs_through(indices: tuple[Tensor | None, ...], size: int) -> bool:
    """Whether the first of several indices keeps rows in order.

    As in ``x[arange, y]``, or in ``x[arange.unsqueeze(1), y]`` with several positions for each row.
    """
    first, *others = indices
    if first is None or first.is_floating_point() or first.dtype == torch.bool:
        return False
    # The rows stay in front if no other index has more dimensions. A mask is read as a list.
    if first.numel() != size or first.shape[:1] != (size,):
        return False
    wide = [x for x in others if x is not None and x.dim() > first.dim()]
    if any(x.dtype != torch.bool for x in wide):
        return False
    return torch.equal(first.flatten().long(), torch.arange(size, device=first.device))
