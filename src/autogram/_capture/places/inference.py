"""Inference: the places of edges of autograd's graph, from the losses down, one node at a time.

Inferred places hold for all values of cotangents and parameters. Where other values decide, such as
those of an index, they are read. A `Road` tells how much is read; the next one is taken if samples
would meet at a wanted edge. From `CONSTANTS` on, a node of a known kind that mixes samples is
probed, because its values may keep them apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autogram._capture.places.places import Places, Shape
from autogram._capture.places.probe import Edge, Probe, Prober
from autogram._capture.places.transfers.step import NodeStep, Read, Road, Unreadable, all_together
from autogram._capture.places.transfers.table import joins_pieces, transfer_of
from autogram._capture.places.transfers.views import from_pieces


class Arrival(NamedTuple):
    """The places that arrive at an edge from one node, or from none at the losses."""

    source: Any
    places: Places


class Told(NamedTuple):
    """How a node moves the samples of its results, whatever its values are."""

    uses: Mapping[Any, Places]
    """The places of uses inside the node."""
    inputs: Mapping[int, Places | None]
    """The places of the node's inputs, by position, as far as they are known."""


Teller = Callable[[Sequence[Places | None]], Told | None]
"""Tells what a node does, from the places of its results; ``None`` if values decide."""


@dataclass(eq=False)
class Inference:
    """The places of edges behind some losses, on one road."""

    road: Road
    read: Read
    prober: Prober
    inside: Mapping[Any, Teller] = field(default_factory=dict)
    """The nodes with uses inside, and the tellers of the places there."""
    parts: defaultdict[Edge, list[Arrival]] = field(default_factory=lambda: defaultdict(list))
    """The arrivals at each edge, which are added up."""
    by_value: set[Any] = field(default_factory=set)
    """The nodes about which more than the graph's structure has decided."""
    untold: set[Any] = field(default_factory=set)
    """Those of them decided by something that cannot be compared in another graph."""
    probes: dict[Any, Probe] = field(default_factory=dict)
    """The probed nodes: at first those of an earlier graph, then those of this one."""
    unknown: set[Any] = field(default_factory=set)
    """The nodes that have no transfer and cannot be carried out."""
    uses: dict[Any, Places] = field(default_factory=dict)
    """The places of the uses inside nodes."""
    _places: dict[Edge, Places | None] = field(default_factory=dict)
    _shapes: dict[Any, list[Shape]] = field(default_factory=dict)

    def at(self, edge: Edge) -> Places | None:
        """The places of all arrivals at an edge; ``None`` if no cotangent arrives."""
        if edge not in self._places:
            total = None
            for part in self.parts.get(edge, ()):
                total = part.places if total is None else total.joined(part.places)
            if total is not None:
                total = total.compact(is_exact=self.road != Road.STRUCTURE)
            self._places[edge] = total
        return self._places[edge]

    def visit(self, node: Any, wanted: set[Any]) -> None:
        """Passes the places of a node's results on to its wanted inputs."""
        inputs = enumerate(node.next_functions)
        edges = [(i, Edge(*edge)) for i, edge in inputs if edge[0] in wanted]
        results = [self.at(Edge(node, i)) for i in range(len(self.shapes(node)))]
        if (edges or node in self.inside) and any(results):
            for (_, edge), places in zip(edges, self.carried(node, results, edges), strict=True):
                if places is not None:
                    self.parts[edge].append(Arrival(node, places))

    def carried(
        self, node: Any, results: Sequence[Places | None], edges: Sequence[tuple[int, Edge]]
    ) -> list[Places | None]:
        """The places of some inputs of a node, from its transfer or a probe."""
        shapes = self.shapes(node)
        if node in self.inside:
            told = self.inside[node](results)
            if told is None or not all(position in told.inputs for position, _ in edges):
                return self._probed(node, results, edges)
            self.uses.update(told.uses)
            return [told.inputs[position] for position, _ in edges]
        if joins_pieces(node):
            return [
                from_pieces(node, results, [*shapes, self.shapes(edge.node)[edge.number]])
                for _, edge in edges
            ]
        transfer = transfer_of(node)
        arrived = [(i, places) for i, places in enumerate(results) if places is not None]
        # If all places belong to one sample, those of the inputs do, too, whatever the node does.
        is_one = self.road == Road.STRUCTURE and all(x.samples.numel() == 1 for _, x in arrived)
        if is_one and len(arrived) == 1:
            transfer = all_together
        elif transfer is None:
            return self._probed(node, results, edges)
        places_of_inputs: list[Places | None] = []
        for position, edge in edges:
            given = self.shapes(edge.node)[edge.number]
            total: Places | None = None
            for number, places in arrived:
                step = NodeStep(
                    node,
                    position,
                    given,
                    number,
                    shapes[number],
                    self.road,
                    self.read,
                    self.prober.gradients,
                )
                try:
                    part = transfer(step, places)
                except Unreadable:
                    self.unknown.add(node)
                    part = all_together(step, places)
                if step.has_read or step.is_hidden:
                    self.by_value.add(node)
                if step.is_hidden:
                    self.untold.add(node)
                total = part if total is None else total.joined(part)
            places_of_inputs.append(total)
        if self.road >= Road.CONSTANTS and are_mixed(places_of_inputs) and not are_mixed(results):
            return self._probed(node, results, edges)
        return places_of_inputs

    def _probed(
        self, node: Any, results: Sequence[Places | None], edges: Sequence[tuple[int, Edge]]
    ) -> list[Places | None]:
        """The places of some inputs of a node, from carrying it out."""
        self.by_value.add(node)
        self.untold.add(node)
        earlier = self.probes.pop(node, None)
        probed = self.prober.probe(node, results, earlier)
        if probed is not None:
            self.probes[node], uses = probed
            self.uses.update(zip(uses, self.probes[node].inside, strict=True))
            return [self.probes[node].inputs[position] for position, _ in edges]
        self.unknown.add(node)
        total: Places | None = None
        for places in results:
            if places is not None:
                one = Places.of((), places.merged(range(len(places.shape))).samples.flatten()[0])
                total = one if total is None else total.joined(one)
        assert total is not None
        return [total.summed(self.shapes(edge.node)[edge.number]) for _, edge in edges]

    def shapes(self, node: Any) -> list[Shape]:
        """The shapes of a node's results."""
        if node not in self._shapes:
            self._shapes[node] = [tuple(metadata.shape) for metadata in node._input_metadata]
        return self._shapes[node]


def are_mixed(places: Iterable[Places | None]) -> bool:
    """Whether samples meet in any of some places."""
    return any(x is not None and x.is_mixed for x in places)


def in_order(root: Any, nodes: Iterable[Any], ends: Iterable[Any]) -> list[Any]:
    """The nodes among some that lead to one of the ends, each after all that lead to it.

    Args:
        root: The node of the losses.
        nodes: All nodes behind the losses.
        ends: The nodes whose places are wanted.
    """
    users: dict[Any, list[Any]] = {node: [] for node in nodes}
    for node in users:
        for child, _ in node.next_functions:
            if child is not None:
                users[child].append(node)
    leading = {node for node in ends if node in users}
    pending = [*leading]
    while pending:
        for user in users[pending.pop()]:
            if user not in leading:
                leading.add(user)
                pending.append(user)
    waiting = {node: len(users[node]) for node in leading}  # all of them lead to an end, too
    ready = [root] if root in waiting else []
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for child, _ in node.next_functions:
            if child in waiting:
                waiting[child] -= 1
                if not waiting[child]:
                    ready.append(child)
    return order
