"""Follows samples through the backward graph of a part, whatever the values are.

A cotangent in the graph is linear in the cotangents of the part's outputs. Given the samples'
places in the latter, their other places follow node by node, as long as an operator keeps them by
its sizes alone. For an operator without a rule they are unknown: each call then measures them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autogram._blocks import Folded
from autogram._compiled.placement.place import (
    UNKNOWN,
    ZERO,
    OperatorCall,
    PlaceOrSeveral,
    Shape,
    Unknown,
)
from autogram._compiled.placement.rules import rule_of
from autogram._compiled.tracing.operator import SHOW


def find_carried(
    module: fx.GraphModule, results: Sequence[Folded | None], sizes: Callable[[Any], Any]
) -> tuple[dict[int, Folded], dict[int, Folded | None]] | None:
    """Where a backward graph takes samples, if that is the same for all values.

    Args:
        module: The graph, with the operators that show cotangents.
        results: The samples' places in the given cotangents, or ``None`` in zeros.
        sizes: Replaces symbols by numbers.

    Returns:
        The places in the cotangents of uses, by number of the use; and the places in the gradients
        of inputs, ``None`` for zeros, omitting those that depend on values. ``None`` if the places
        in a use depend on values.
    """
    nodes = module.graph.nodes
    given = [x for x in nodes if x.op == "placeholder" and x.name.startswith("tangents")]
    if len(given) != len(results):
        return None

    def shape_of(node: fx.Node) -> Shape:
        shape = tuple(sizes(tuple(node.meta["val"].shape)))
        if any(not isinstance(size, int) for size in shape):
            raise TypeError
        return shape

    places: dict[fx.Node, PlaceOrSeveral] = dict.fromkeys(nodes)
    places.update({x: place or ZERO for x, place in zip(given, results, strict=True)})
    try:
        for node in nodes:
            linear = [place for x in node.all_input_nodes if (place := places[x]) is not None]
            if linear and node.op == "call_function":
                are_zero = all(place is ZERO for place in linear)
                places[node] = ZERO if are_zero else _place(OperatorCall(node, places, shape_of))
    except (TypeError, KeyError, AttributeError, IndexError):
        return None  # a size does not follow from the inputs, or an operator has another form
    uses: dict[int, Folded] = {}
    for node in nodes:
        if node.target is SHOW:
            cotangent, _, number = node.args
            place = places[cotangent]
            if isinstance(place, (tuple, Unknown)):
                return None
            if isinstance(place, Folded):
                uses[number] = place
    outputs: Any = module.graph.output_node().args[0]
    found = [places[x] if isinstance(x, fx.Node) else ZERO for x in outputs]
    inputs = {i: None if x is ZERO else x for i, x in enumerate(found)}
    return uses, {i: x for i, x in inputs.items() if x is None or isinstance(x, Folded)}


def _place(call: OperatorCall) -> PlaceOrSeveral:
    """The samples' places in the result of a call."""
    if call.node.target is operator.getitem:
        whole, item = call.node.args
        found = call.places[whole]  # type: ignore[index]  # a node
        return found[item] if isinstance(found, tuple) else found  # type: ignore[index]  # an integer
    rule = rule_of(call.node.target)
    return UNKNOWN if rule is None else rule(call)
