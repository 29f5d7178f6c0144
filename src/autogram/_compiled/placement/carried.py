"""Where samples go in the backward graph of a part, whatever the values are.

A cotangent in the graph is linear in those of the part's outputs. From where the samples lie in the
latter, their places follow node by node, as long as an operator keeps them by its sizes alone. What
an operator does that has no rule is unknown: then samples are measured in each call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from autogram._blocks import Folded
from autogram._compiled.placement.place import (
    UNKNOWN,
    ZERO,
    OperatorCall,
    Place,
    Places,
    Shape,
    Unknown,
)
from autogram._compiled.placement.rules import rule_of
from autogram._compiled.tracing.operator import SHOW


class Carried(NamedTuple):
    """Where the backward pass of a part takes the samples of its results.

    Attributes:
        uses: The place of each use's cotangent, by its number in the part.
        inputs: The places in the gradients of the inputs, by position.
    """

    uses: Mapping[int, Place]
    inputs: Sequence[Places]


def find_carried(
    module: fx.GraphModule, results: Sequence[Folded | None], sizes: Callable[[Any], Any]
) -> Carried | None:
    """Where a backward graph takes samples, if it does so whatever its values are.

    Args:
        module: The graph, with the operators that show cotangents.
        results: Where the samples lie in the cotangents that it is given, or ``None`` in zeros.
        sizes: Puts numbers in the place of symbols.
    """
    graph = module.graph
    given = [x for x in graph.nodes if x.op == "placeholder" and x.name.startswith("tangents")]
    if len(given) != len(results):
        return None

    def shape_of(node: fx.Node) -> Shape:
        shape = tuple(sizes(tuple(node.meta["val"].shape)))
        if any(not isinstance(size, int) for size in shape):
            raise TypeError
        return shape

    seeds = {x: ZERO if place is None else place for x, place in zip(given, results, strict=True)}
    try:
        places = places_in(graph, seeds, shape_of)
    except (TypeError, KeyError, AttributeError, IndexError):
        return None  # a size that does not follow from the inputs, or an operator of another form
    uses: dict[int, Place] = {}
    for node in graph.nodes:
        if node.target is SHOW:
            cotangent, _, number = node.args
            place = places[cotangent]
            if isinstance(place, (tuple, Unknown)):
                return None
            uses[number] = place
    outputs: Any = graph.output_node().args[0]
    return Carried(uses, [places[x] if isinstance(x, fx.Node) else ZERO for x in outputs])


def places_in(
    graph: fx.Graph, given: Mapping[fx.Node, Place], shape_of: Callable[[fx.Node], Shape]
) -> dict[fx.Node, Places]:
    """Where the samples lie in each value of a graph.

    Args:
        graph: The graph.
        given: The places in inputs that are cotangents.
        shape_of: The shape of a tensor of the graph.
    """
    places: dict[fx.Node, Places] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            places[node] = given.get(node)
        elif node.op == "call_function":
            inputs = [places[x] for x in node.all_input_nodes]
            linear = [x for x in inputs if x is not None]
            if not linear:
                places[node] = None
            elif all(x is ZERO for x in linear):
                places[node] = ZERO
            else:
                places[node] = _place(OperatorCall(node, places, shape_of))
        elif node.op != "output":
            places[node] = None
    return places


def _place(call: OperatorCall) -> Places:
    """Where the samples lie in what a call computes."""
    if call.node.target is operator.getitem:
        whole, item = call.node.args
        found = call.places[whole]  # type: ignore[index]  # a node
        return found[item] if isinstance(found, tuple) else found  # type: ignore[index]  # an integer
    rule = rule_of(call.node.target)
    return UNKNOWN if rule is None else rule(call)
