"""Rules that tell, by sizes alone, where operators of a backward graph take the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autogram._blocks import Folded
from autogram._compiled.placement.place import (
    UNKNOWN,
    ZERO,
    OperatorCall,
    Place,
    PlacementRule,
    PlaceOrSeveral,
    common,
    moved,
)
from autogram._compiled.tracing.operator import SHOW

aten = torch.ops.aten

# A rule that is also given the place in the first argument.
FirstRule = Callable[[OperatorCall, Folded], PlaceOrSeveral]


def _pointwise(call: OperatorCall) -> Place:
    shape = call.shape
    found: list[Place] = []
    for x in call.node.all_input_nodes:
        place = call.of(x)
        if isinstance(place, Folded):
            own = call.shape_of(x)
            dim = place.dim + len(shape) - len(own)
            place = moved(place, dim) if shape[dim] == own[place.dim] else UNKNOWN
        found.append(place)
    return common(found)


def _reshape(call: OperatorCall, place: Folded) -> Place:
    if 0 in call.shape:
        return ZERO
    return place.reshaped(call.shape_of(call.first), call.shape) or UNKNOWN


def _kept(fits: Callable[[OperatorCall, int], bool], others: int = 0) -> FirstRule:
    """Keeps places in dimensions that fit, and loses them in ``others`` more results."""

    def rule(call: OperatorCall, place: Folded) -> PlaceOrSeveral:
        kept = place if fits(call, place.dim) else UNKNOWN
        return (kept, *[UNKNOWN] * others) if others else kept

    return rule


_same = _kept(lambda _call, _dim: True)


def _is_not_flipped(call: OperatorCall, dim: int) -> bool:
    return dim not in [d % len(call.shape) for d in call.argument(1, "dims")]


def _is_not_padded(call: OperatorCall, dim: int) -> bool:
    from_last = len(call.shape) - 1 - dim
    return not any(call.argument(1, "pad")[2 * from_last : 2 * from_last + 2])


def _is_not_normalized(call: OperatorCall, dim: int) -> bool:
    return dim < len(call.shape_of(call.first)) - len(call.argument(2, "normalized_shape"))


def _permute(call: OperatorCall, place: Folded) -> Place:
    rank = len(call.shape)
    order = list(range(rank))
    packet = call.node.target.overloadpacket  # type: ignore[union-attr]  # an operator
    if packet is aten.permute:
        order = [d % rank for d in call.argument(1, "dims")]
    elif rank > 1:
        is_t = packet is aten.t
        a, b = (0, 1) if is_t else (call.argument(1, "dim0"), call.argument(2, "dim1"))
        order[a], order[b] = order[b], order[a]
    return moved(place, order.index(place.dim))


def _sum(call: OperatorCall, place: Folded) -> Place:
    dims = call.argument(1, "dim")
    if not isinstance(dims, (list, tuple)) or not dims:
        return UNKNOWN
    rank = len(call.shape_of(call.first))
    gone = {d % rank for d in dims}
    if place.dim in gone:
        return UNKNOWN
    lost = 0 if call.argument(2, "keepdim", False) else sum(d < place.dim for d in gone)
    return moved(place, place.dim - lost)


def _matrices(call: OperatorCall) -> Place:
    left, right = call.of(call.node.args[0]), call.of(call.node.args[1])
    rank = len(call.shape)
    if isinstance(left, Folded) and right is None and left.dim < rank - 1:
        return left
    if isinstance(right, Folded) and left is None and right.dim != rank - 2:
        return right
    return UNKNOWN


def _cat(call: OperatorCall) -> Place:
    parts = list(call.first)
    places = [call.of(x) for x in parts]
    place = common(places)
    dim = call.argument(1, "dim", 0) % len(call.shape)
    if not isinstance(place, Folded) or place.dim != dim:
        return place if isinstance(place, Folded) else UNKNOWN
    # All samples follow one another repeatedly, if each part has them all.
    sizes = {call.shape_of(x)[dim] for x in parts}
    if len(sizes) > 1 or any(not isinstance(x, Folded) for x in places):
        return UNKNOWN
    return Folded(dim, place.before * len(parts), place.batch, place.after)


def _stack(call: OperatorCall) -> Place:
    place = common([call.of(x) for x in call.first])
    dim = call.argument(1, "dim", 0) % len(call.shape)
    return moved(place, place.dim + (dim <= place.dim)) if isinstance(place, Folded) else UNKNOWN


def _along(
    position: int, *, drops: bool = False, is_slice: bool = False, has_parts: bool = False
) -> FirstRule:
    """For operators that mix, select or split along one dimension, and may drop it."""

    def rule(call: OperatorCall, place: Folded) -> Place:
        shape = call.shape_of(call.first)
        dim = call.argument(position, "dim", 0) % len(shape)
        if place.dim == dim:  # a slice may be the whole
            return place if is_slice and call.shape == shape else UNKNOWN
        new = moved(place, place.dim - (drops and dim < place.dim))
        return new if has_parts or call.shape[new.dim] == shape[place.dim] else UNKNOWN

    return rule


def _select_backward(call: OperatorCall, place: Folded) -> Place:
    dim = call.argument(2, "dim", 0) % len(call.shape)
    return moved(place, place.dim + (dim <= place.dim))


def _scatter(call: OperatorCall) -> Place:
    """Elements move along one dimension, into zeros or another cotangent."""
    base, dim, source = call.first, call.argument(1, "dim"), call.argument(3, "src")
    if not isinstance(source, fx.Node):
        return UNKNOWN
    place = common([call.of(base), call.of(source)])
    if not isinstance(place, Folded) or place.dim == dim % len(call.shape):
        return UNKNOWN
    is_whole = call.shape_of(source)[place.dim] == call.shape[place.dim]
    return place if is_whole else UNKNOWN


def _scattered_part(*, keeps_dim: bool) -> PlacementRule:
    """For `slice_scatter` and `select_scatter`: a part of a tensor along one dimension."""

    def rule(call: OperatorCall) -> Place:
        base, part = call.of(call.first), call.of(call.node.args[1])
        dim = call.argument(2, "dim", 0) % len(call.shape)
        if isinstance(part, Folded) and not keeps_dim:
            part = moved(part, part.dim + (dim <= part.dim))
        place = common([base, part])
        return UNKNOWN if not isinstance(place, Folded) or place.dim == dim else place

    return rule


def _attention(call: OperatorCall, place: Folded) -> PlaceOrSeveral:
    del call
    kept = place if place.dim < 2 else UNKNOWN
    return (kept, kept, kept, UNKNOWN)


def _nll(call: OperatorCall, place: Folded) -> Place:
    """The classes are the second dimension, unless there is only one sample."""
    if call.argument(4, "reduction", 1) != 0 or len(call.shape) < 2:
        return UNKNOWN
    return moved(place, place.dim + (place.dim > 0))


def _of_first(rule: FirstRule) -> PlacementRule:
    """A rule for calls whose only cotangent is the first argument."""

    def of(call: OperatorCall) -> PlaceOrSeveral:
        place = call.only_first()
        return UNKNOWN if place is None else rule(call, place)

    return of


def _named(names: str) -> list[Any]:
    """The operators that this version of PyTorch has."""
    return [found for name in names.split() if (found := getattr(aten, name, None)) is not None]


# Operators that keep places if their only cotangent is the first argument.
_OF_FIRST: list[tuple[FirstRule, str]] = [
    (_reshape, "view _unsafe_view unsqueeze squeeze _reshape_alias"),
    (_same, "clone alias detach _to_copy lift_fresh_copy"),
    (_permute, "permute transpose t"),
    (_kept(_is_not_flipped), "flip"),
    (_sum, "sum mean"),
    (_along(1, is_slice=True), "slice"),
    (_along(1), "cumsum index_select gather"),
    (_along(1, drops=True), "select"),
    (_select_backward, "select_backward"),
    (_along(2, is_slice=True), "slice_backward"),
    (_along(2, has_parts=True), "split split_with_sizes"),
    (_along(1, drops=True, has_parts=True), "unbind"),
    (_kept(_is_not_padded), "constant_pad_nd"),
    (
        _kept(lambda call, dim: dim < len(call.shape) - 2),
        "_adaptive_avg_pool2d_backward avg_pool2d_backward max_pool2d_with_indices_backward "
        "upsample_nearest2d_backward upsample_bilinear2d_backward",
    ),
    # Gradients of the input, then of parameters.
    (_kept(lambda _call, dim: dim == 0, 2), "convolution_backward native_group_norm_backward"),
    (_kept(_is_not_normalized, 2), "native_layer_norm_backward"),
    (
        _kept(lambda call, _dim: not call.argument(7, "train", True), 2),
        "native_batch_norm_backward",
    ),
    (_along(2), "_softmax_backward_data _log_softmax_backward_data"),
    (
        _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward",
    ),
    (_nll, "nll_loss_backward nll_loss2d_backward"),
]
_OTHERS: list[tuple[PlacementRule, str]] = [
    (  # only the shape counts
        lambda _call: None,
        "new_zeros new_empty new_full new_ones zeros_like full_like ones_like empty_like",
    ),
    (_matrices, "mm bmm"),
    (_cat, "cat"),
    (_stack, "stack"),
    (_scatter, "scatter scatter_add"),
    (_scattered_part(keeps_dim=True), "slice_scatter"),
    (_scattered_part(keeps_dim=False), "select_scatter"),
    (_pointwise, "native_dropout_backward where copy expand"),
]
_RULES: dict[Any, PlacementRule] = {
    SHOW.overloadpacket: _of_first(_same),
    torch.ops.prims.convert_element_type: _of_first(_same),
    **{found: _of_first(rule) for rule, names in _OF_FIRST for found in _named(names)},
    **{found: rule for rule, names in _OTHERS for found in _named(names)},
}


def rule_of(target: Any) -> PlacementRule | None:
    """The rule for an operator, if there is one."""
    rule = _RULES.get(getattr(target, "overloadpacket", None))
    if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return _pointwise
    return rule
