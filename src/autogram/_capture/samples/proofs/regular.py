"""Regular places: whether samples that have them in a node's result have them in its inputs, too.

A node that carries a dimension keeps samples apart along it. Where several places of each sample
share the dimension, a view or a number, such as the start of a slice, may make places irregular.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from autogram._blocks import Folded
from autogram._capture.autograd.graph import kind_of_node
from autogram._capture.samples.proofs.carrying import Shape, wrapped

_SHIFTING = "Slice", "Cat", "Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes"


def stays_regular(layout: Folded, result: Shape, given: Shape) -> bool:
    """Whether samples in regular places of a view's result are so in the tensor that is viewed.

    With strides that count elements, the sample of element i is ``i // stride % batch``. So one
    dimension of the tensor must hold all steps of this stride.
    """
    stride = layout.after * prod(result[layout.dim + 1 :])
    own = [prod(given[dim:]) for dim in range(len(given) + 1)]
    return any(
        own[dim] % (stride * layout.batch) == 0 and stride % max(own[dim + 1], 1) == 0
        for dim in range(len(given))
    )


def stays_at_all_sizes(layout: Folded, result: Shape, given: Shape) -> bool:
    """Whether samples that stay regular in a viewed tensor do so at all sizes of one pattern.

    So they do if they are outermost or innermost of the dimensions that the view puts together, or
    if there is one such dimension in the viewed tensor.
    """
    stride = layout.after * prod(result[layout.dim + 1 :])
    ours, theirs = ({prod(x[dim:]) for dim in range(len(x) + 1)} for x in (result, given))
    above = min(n for n in ours & theirs if n >= prod(result[layout.dim :]))
    below = max(n for n in ours & theirs if n <= prod(result[layout.dim + 1 :]))
    is_at_end = stride * layout.batch == above or stride == below
    return is_at_end or not any(below < n < above for n in theirs)


def may_shift(node: Any, layouts: Iterable[Folded], pieces: Iterable[Shape] | None) -> bool:
    """Whether a node moves samples along their dimension by a number that may be any.

    Regular places become other ones then, or irregular ones, if more than samples are in this
    dimension.

    Args:
        node: The node.
        layouts: Where samples are in its result and in its inputs.
        pieces: The shapes of all that is put together, or that a tensor is split into, if known.
    """
    operation = kind_of_node(node.__class__).operation
    folded = [x for x in layouts if x.before * x.after > 1]
    rank = len(node._input_metadata[0].shape)
    if operation == "ConstantPadNd":
        return any(x.dim >= rank - len(node._saved_pad) // 2 for x in folded)
    if operation not in _SHIFTING:
        return operation == "Diagonal" and bool(folded)
    moved = [x for x in folded if x.dim == wrapped(node._saved_dim, rank)]
    is_even = pieces is not None and all(
        x.after == 1 and not any(shape[x.dim] % x.batch for shape in pieces) for x in moved
    )
    return bool(moved) and not is_even
