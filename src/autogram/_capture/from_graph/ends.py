"""Ends: the edges of autograd's graph at which the samples' places end.

A node whose cotangent has the samples apart may read something for which they are not: a parameter,
or a tensor that is computed from parameters. J is the sum, over these edges, of the rows at the
edge, pulled back to the parameters, if no gradient flows on along these edges: the chain rule is
linear. What counts as mixed is exact in any case, and costs rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from autogram._capture.autograd.graph import nodes_from
from autogram._capture.from_graph.views import is_of_view
from autogram._capture.places.finding import refuse_nested
from autogram._capture.places.inference import Arrival, Inference, are_mixed, in_order
from autogram._capture.places.places import Places
from autogram._capture.places.probe import Edge, Prober
from autogram._capture.places.reading import reading
from autogram._capture.places.transfers.step import Road
from autogram._capture.recording import Channel, noted_among


class End(NamedTuple):
    """A node at which places end, in the order of a walk, and at which of its inputs."""

    node: int
    positions: tuple[int, ...]


class Graph(NamedTuple):
    """The graph of some losses, as far as it leads to parameters of J."""

    root: Edge
    """The edge of the losses."""
    nodes: Sequence[Any]
    """All nodes, in the order of a walk."""
    order: Sequence[Any]
    """Those that lead to parameters, each after all that lead to it."""
    plain: frozenset[Any]
    """Those of parameters, and of views of one parameter."""
    leaves: frozenset[Any]
    """Those of parameters."""

    @classmethod
    def of(cls, losses: Tensor, nodes: Sequence[Any], inside: Sequence[Tensor]) -> Graph:
        """The graph with some parameters.

        Args:
            losses: The objectives.
            nodes: All nodes behind the losses.
            inside: The parameters of J.
        """
        parameters = {id(p) for p in inside}
        leaves = [x for x in nodes if id(getattr(x, "variable", None)) in parameters]
        root = Edge(losses.grad_fn, losses.output_nr)
        order = in_order(root.node, nodes, leaves)
        plain = {*leaves}
        for node in reversed(order):
            if is_of_view(node) and node.next_functions[0][0] in plain:
                plain.add(node)
        plain.discard(root.node)
        return cls(root, nodes, order, frozenset(plain), frozenset(leaves))

    def ends(self, apart: set[Any]) -> list[End]:
        """The ends of places, for the nodes that have the samples ``apart``."""
        ends, there, numbers = [], {*self.order}, {node: i for i, node in enumerate(self.nodes)}
        for node in self.order:
            if node in apart:
                positions = [
                    position
                    for position, (child, _) in enumerate(node.next_functions)
                    if child in there and child not in apart
                ]
                if positions:
                    ends.append(End(numbers[node], tuple(positions)))
        return ends


def ends_at_parameters(graph: Graph) -> list[End]:
    """The ends where the batch is one sample: all nodes that read a parameter."""
    return graph.ends({*graph.order} - graph.plain)


def ends_of_samples(graph: Graph, start: Places, channel: Channel, most_rows: int) -> list[End]:
    """The ends of the samples' places, on the first road on which most nodes have them apart.

    Args:
        graph: The graph of the losses.
        start: The places of the losses.
        channel: Of the engine.
        most_rows: How many elements the rows may have that are pulled back from what is computed
            from parameters.

    Raises:
        MetError: Samples meet at a node, and rows would have more elements.
        UnsupportedError: There is a nested tensor.
    """
    refuse_nested(graph.nodes)
    most: set[Any] = set()
    prober = Prober(channel, graph.nodes)
    with reading(graph.nodes, channel) as reader:
        for road in Road:
            inference = Inference(road, reader.read, prober)
            inference.parts[graph.root] = [Arrival(None, start)]
            apart = _apart(graph, inference)
            if len(apart) > len(most):
                most = apart
            if {*graph.order} - apart == graph.plain:
                break  # places end at parameters alone
    mixed = {*graph.order} - most - graph.plain
    for node in graph.order if mixed else ():
        if node in most:
            _refuse_large_rows(node, graph, mixed, channel, most_rows // prod(start.shape))
    return graph.ends(most)


def _refuse_large_rows(
    node: Any, graph: Graph, mixed: set[Any], channel: Channel, most: int
) -> None:
    """Raises where rows would be pulled back, through a module's result, to large parameters."""
    read = [child for child, _ in node.next_functions if child in mixed]
    behind = [*nodes_from(read)]
    elements = sum([x.variable.numel() for x in behind if x in graph.leaves])
    if elements > most and noted_among(behind, channel):
        raise MetError(node)


class MetError(Exception):
    """Samples meet at a node, before they reach a module with large parameters."""

    def __init__(self, node: Any) -> None:
        super().__init__()
        self.node = node


def _apart(graph: Graph, inference: Inference) -> set[Any]:
    """The nodes all of whose results have the samples apart, and so all nodes before them."""
    wanted = {*graph.order} - graph.plain
    mixed: set[Any] = set()
    for node in graph.order:
        if node in graph.plain:
            continue
        results = [inference.at(Edge(node, i)) for i in range(len(inference.shapes(node)))]
        if node in mixed or are_mixed(results):
            mixed.update([node, *[child for child, _ in node.next_functions if child in wanted]])
        else:
            inference.visit(node, wanted)
    return wanted - mixed
