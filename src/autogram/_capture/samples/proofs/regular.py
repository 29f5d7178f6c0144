"""Regular places: whether samples that have them in a node's result have them in its inputs, too.

A node that carries a dimension keeps samples apart along it. Where several places of each sample
share the dimension, a view or a number, such as the start of a slice, may make places irregular.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autogram._blocks import Folded
from autogram._capture.autograd.graph import VIEWS, kind_of_node
from autogram._capture.samples.proofs.carrying import Crossing, Shape, wrapped
from autogram._capture.samples.proofs.moves import keeps_first
from autogram._capture.samples.proofs.spots import Onward, Regular, Spot, Ways, results_of_node
from autogram._capture.samples.survey import Survey

_SHIFTING = {
    *("Slice", "SliceBackward", "Cat", "Split", "SplitWithSizes", "UnsafeSplit"),
    "UnsafeSplitWithSizes",
}


def stays_at_all_sizes(layout: Folded, result: Shape, given: Shape) -> bool:
    """Whether samples that stay regular in a viewed tensor do so at all sizes of one pattern.

    So they do if they are outermost or innermost of the dimensions that the view puts together, or
    if there is one such dimension in the viewed tensor.
    """
    stride = _stride(layout, result)
    ours, theirs = ({prod(x[dim:]) for dim in range(len(x) + 1)} for x in (result, given))
    above = min(n for n in ours & theirs if n >= prod(result[layout.dim :]))
    below = max(n for n in ours & theirs if n <= prod(result[layout.dim + 1 :]))
    is_at_end = stride * layout.batch == above or stride == below
    return is_at_end or not any(below < n < above for n in theirs)


def narrowed(survey: Survey, ways: Ways, regular: Regular) -> Regular:
    """The layouts that fit spots, without those that only seem to.

    Where few places have a cotangent, as those of class tokens, several layouts of one dimension
    may fit, of which nodes in front allow one: a view, and a node that leaves each place where it
    is, tell from where samples are in their result where these are behind. Which of several
    dimensions is right is not decided here: where values have made another one fit, a proof has to
    compare these.
    """
    found = dict(regular)
    for number in ways:
        results = [spot for spot in results_of_node(survey, number) if spot in found]
        known = found[results[0]] if len(results) == 1 else None
        if known is None or len(known) != 1:
            continue
        node = survey.nodes[number]
        is_view = kind_of_node(node.__class__).operation in VIEWS
        for way in ways[number]:
            edge = Crossing(node, way.arrival.position, results[0].shape, way.target.shape)
            stride = _stride(known[0], edge.result)
            is_first = known[0].dim == 0 and edge.result[:1] == edge.given[:1]
            is_kept = way.moves_nothing or (is_first and keeps_first(edge))
            for spot in {way.arrival, way.target}:
                fitting = found.get(spot) or ()
                right = {
                    x.dim: x
                    for x in fitting
                    if (is_view and _stride(x, edge.given) == stride) or (is_kept and x == known[0])
                }
                if right:
                    found[spot] = tuple([x for x in fitting if right.get(x.dim, x) == x])
    return found


def _stride(layout: Folded, shape: Shape) -> int:
    """How many elements, in order, are between the places of a sample and of the next one."""
    return layout.after * prod(shape[layout.dim + 1 :])


def may_shift(survey: Survey, spot: Spot, ways: Sequence[Onward], regular: Regular) -> bool:
    """Whether a node moves samples of its result by numbers that may be any, as that of a slice.

    Regular places become other ones then, or irregular ones, if more than samples are in a
    dimension.
    """
    node, layouts = survey.nodes[spot.node], regular[spot] or ()
    operation, rank = kind_of_node(node.__class__).operation, len(node._input_metadata[0].shape)
    if operation in VIEWS:
        return not all(stays_at_all_sizes(x, spot.shape, ways[0].target.shape) for x in layouts)
    arrived = [x for way in ways for x in regular.get(way.arrival) or ()]
    folded = [x for x in (*layouts, *arrived) if x.before * x.after > 1]
    if operation == "ConstantPadNd":
        return any(x.dim >= rank - len(node._saved_pad) // 2 for x in folded)
    if operation not in _SHIFTING:
        return operation in ("Diagonal", "DiagonalBackward") and bool(folded)
    moved = [x for x in folded if x.dim == wrapped(node._saved_dim, rank)]
    if operation == "Cat":
        pieces, is_known = [x.target for x in ways], len(ways) == len(node.next_functions)
    else:
        pieces = [*results_of_node(survey, spot.node)]
        is_known = operation not in ("Slice", "SliceBackward")
    is_even = is_known and all(
        x.after == 1 and not any(of.shape[x.dim] % x.batch for of in pieces) for x in moved
    )
    return bool(moved) and not is_even
