"""Findings: facts about all graphs of one key, and values that decide in each graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._capture.places.inference import (
    Arrival,
    Inference,
    Teller,
    are_mixed,
    in_order,
)
from autogram._capture.places.places import Places
from autogram._capture.places.probe import Edge, Probe, Prober
from autogram._capture.places.reading import DecidingValue, reading
from autogram._capture.places.transfers.step import Road
from autogram._capture.recording import Channel
from autogram.errors import UnsupportedError

# A result of a node, identified by the node's number in the order of a walk.
_NumberedEdge = tuple[int, int]


class PlacesInGraph(NamedTuple):
    """The places in one graph."""

    edges: Mapping[int, Places | None]
    """Places of wanted edges, by the edges' numbers."""
    uses: Mapping[Any, Places]
    """Places of uses inside nodes."""

    @property
    def is_mixed(self) -> bool:
        """Whether samples meet."""
        return are_mixed(self.edges.values()) or are_mixed(self.uses.values())


@dataclass(eq=False)
class Finding:
    """How to find the places of some edges in graphs of one key."""

    road: Road
    edges: Sequence[_NumberedEdge]
    """The wanted edges."""
    again: list[int]
    """The nodes about which values decide, and all nodes behind them, in order."""
    parts: dict[_NumberedEdge, list[Arrival]]
    """Arrivals at these from other nodes, which no value decides."""
    constants: dict[DecidingValue, Tensor]
    """Copies of the values read in the last graph."""
    probes: dict[int, Probe]
    """Results of probes of nodes in the last graph."""
    has_untold: bool
    """Whether something besides the constants decides."""
    unknown: frozenset[int]
    """The nodes that could not be followed."""
    mixing: int
    """The first node from the losses that mixes samples on the way to a wanted edge, if any."""

    def changes(self, nodes: Sequence[Any], channel: Channel) -> list[Tensor]:
        """Whether each constant has other values in another graph, as tensors on its device."""
        with reading(nodes, channel) as reader:
            return [_differ(reader.value(x), old) for x, old in self.constants.items()]

    def infer_again(
        self, nodes: Sequence[Any], channel: Channel, inside: Mapping[Any, Teller]
    ) -> tuple[Finding, PlacesInGraph]:
        """Looks, in another graph of the same key, only at the nodes about which values decide.

        Returns:
            The finding with the constants of that graph, and the places that may have changed.
        """
        with reading(nodes, channel) as reader:
            reader.fetch(self.constants)
            inference = Inference(self.road, reader.read, Prober(channel, nodes), inside)
            for (node, number), parts in self.parts.items():
                inference.parts[Edge(nodes[node], number)] += parts
            inference.probes.update({nodes[number]: probe for number, probe in self.probes.items()})
            wanted = {nodes[number] for number in self.again}
            for number in self.again:
                inference.visit(nodes[number], wanted)
            constants = reader.constants()
        edges = {i: Edge(nodes[node], number) for i, (node, number) in enumerate(self.edges)}
        places = {i: inference.at(edge) for i, edge in edges.items() if edge.node in wanted}
        probes = {reader.numbers[node]: probe for node, probe in inference.probes.items()}
        in_graph = PlacesInGraph(places, inference.uses)
        return replace(self, constants=constants, probes=probes), in_graph


def infer(
    root: Edge,
    start: Places,
    nodes: Sequence[Any],
    edges: Sequence[Edge],
    channel: Channel,
    inside: Mapping[Any, Teller] = MappingProxyType({}),
) -> tuple[Finding, PlacesInGraph]:
    """The finding on the first road on which no samples meet at a use, and the places.

    Args:
        root: The edge of the losses.
        start: The places of the losses.
        nodes: All nodes behind the losses, in the order of a walk.
        edges: The edges whose places are wanted.
        channel: The channel of the graph's uses, also shown by nodes that are carried out alone.
        inside: The nodes with uses inside, whose places are wanted, too.

    Raises:
        UnsupportedError: There is a nested tensor, whose shape does not tell the samples.
    """
    refuse_nested(nodes)
    order = in_order(root.node, nodes, [*[edge.node for edge in edges], *inside])
    wanted = {*order}
    prober = Prober(channel, nodes)
    with reading(nodes, channel) as reader:
        for road in Road:
            inference = Inference(road, reader.read, prober, inside)
            inference.parts[root] = [Arrival(None, start)]
            for node in order:
                inference.visit(node, wanted)
            places = {i: inference.at(edge) for i, edge in enumerate(edges)}
            in_graph = PlacesInGraph(places, inference.uses)
            if not in_graph.is_mixed:
                break
        mixing = _mixing(inference, root, nodes, edges) if in_graph.is_mixed else root.node
        constants, numbers = reader.constants(), reader.numbers
    again: dict[Any, None] = {}
    for node in order:
        if node in inference.by_value or node in again:
            again[node] = None
            again.update({child: None for child, _ in node.next_functions if child in wanted})
    parts = {
        (numbers[edge.node], edge.number): [
            Arrival(None, part.places) for part in inference.parts[edge] if part.source not in again
        ]
        for edge in inference.parts
        if edge.node in again
    }
    finding = Finding(
        road,
        [(numbers[edge.node], edge.number) for edge in edges],
        [numbers[node] for node in order if node in again],
        parts,
        constants,
        {numbers[node]: probe for node, probe in inference.probes.items()},
        bool(inference.untold),
        frozenset(numbers[node] for node in inference.unknown),
        numbers[mixing],
    )
    return finding, in_graph


def refuse_nested(nodes: Sequence[Any]) -> None:
    """Refuses a graph with a nested tensor, whose shape tells nothing."""
    results = [of for node in nodes for of in getattr(node, "_input_metadata", ())]
    if any(of.is_nested_tensor for of in results):
        raise UnsupportedError(
            "The graph of the losses contains a nested tensor, and no node shows where the "
            "samples are in it. Pad the samples to one size, or pass `batch_dim=None` (exact, "
            "slower)."
        )


def _mixing(inference: Inference, root: Edge, nodes: Sequence[Any], edges: Sequence[Edge]) -> Any:
    """The first node from the losses that mixes samples on the way to one of some edges."""

    def is_mixed(edge: Edge) -> bool:
        places = inference.at(edge)
        return places is not None and places.is_mixed

    ends = [edge.node for edge in edges if is_mixed(edge)]
    inside = () if ends else inference.inside  # where samples meet, if not at an edge
    order = in_order(root.node, nodes, [*ends, *inside])
    wanted = {*order}
    for node in order:
        results = [Edge(node, number) for number in range(len(inference.shapes(node)))]
        if any(map(is_mixed, results)):
            return node  # samples meet in a sum of several tensors
        inputs = [(i, Edge(*e)) for i, e in enumerate(node.next_functions) if e[0] in wanted]
        carried = inference.carried(node, [*map(inference.at, results)], inputs)
        if are_mixed(carried) or node in inside:
            return node
    return root.node


def _differ(new: Tensor, old: Tensor) -> Tensor:
    """Whether two tensors differ, as a tensor on their device."""
    if new.shape != old.shape or new.device != old.device:
        return torch.ones((), dtype=torch.bool, device="cpu")
    return (new != old).any()
