"""Layouts that the graph tells: places of the samples at each use, inferred and remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Folded, Placement
from autogram._capture.autograd.graph import calls_of
from autogram._capture.from_graph.ends import MetError, ends_at_parameters, ends_of_samples
from autogram._capture.from_graph.use_plan import UsePlan
from autogram._capture.places.finding import Finding, PlacesInGraph, infer
from autogram._capture.places.inference import Teller, Told, are_mixed
from autogram._capture.places.places import Places, Shape
from autogram._capture.places.probe import Edge
from autogram._capture.samples.layouts import (
    layout_of_places,
    mixed_samples,
    regular_layout_of_places,
)
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use
from autogram.errors import MixedSamplesError, listed

Layouts = dict[Use, Placement | None]
"""By use; ``None`` where no cotangent arrives."""


@dataclass(eq=False)
class Inferred:
    """The layouts of all uses in graphs of one key."""

    finding: Finding
    layouts: list[Placement | None]
    """Those of the last graph, in the order of the survey's uses."""
    plan: UsePlan | None = None
    """How uses are read, if they are read from the graph."""

    @classmethod
    def of(cls, survey: Survey, objectives: Objectives, most_rows: int) -> tuple[Inferred, Layouts]:
        """By a look at the whole graph, with the layouts there.

        Where uses are read from the graph, rows that are pulled back have at most ``most_rows``
        elements.

        Raises:
            MixedSamplesError: Samples meet before they reach a use, or it is not known whether they
                do.
            UnsupportedError: There is a nested tensor.
        """
        layout, losses, nodes = objectives.layout, survey.losses, survey.nodes
        assert layout is not None
        start = Places.along(losses.shape, layout.dim)
        plan = None
        if survey.channel.reads_graph:
            try:
                ends = ends_of_samples(survey.graph, start, survey.channel, most_rows)
            except MetError as met:
                survey.read_at(ends_at_parameters(survey.graph))
                raise _met_at(met.node, next(iter(survey.uses)), survey) from None
            plan = survey.read_at(ends)
        edges = {
            use: Edge(nodes[number], 0)
            for use, number in survey.uses.items()
            if number not in survey.enclosing
        }
        for each in (*survey.tail, *survey.node_uses):
            edges[each] = Edge(each.edge.node, each.edge.output_nr)
        root = Edge(losses.grad_fn, losses.output_nr)
        inside = _tells(survey, objectives.samples)
        finding, in_graph = infer(root, start, nodes, [*edges.values()], survey.channel, inside)
        inferred = cls(finding, [None] * len(survey.uses), plan)
        layouts = inferred._take(finding, in_graph, survey, objectives.samples)
        if layouts is not None:
            return inferred, layouts
        by_use = {**in_graph.uses, **{use: in_graph.edges[i] for i, use in enumerate(edges)}}
        mixed = next(use for use, places in by_use.items() if are_mixed([places]))
        raise _mixed(finding, mixed, survey)

    def changes(self, survey: Survey) -> list[Tensor] | None:
        """Whether each value that decides is another one in a graph of this key, on its device.

        ``None`` where there are others that decide.
        """
        return (
            None if self.finding.has_untold else self.finding.changes(survey.nodes, survey.channel)
        )

    def look_again(self, survey: Survey, samples: int) -> Layouts | None:
        """By the values that decide in a graph of this key; ``None`` if that does not tell all."""
        inside = _tells(survey, samples)
        finding_in_graph = self.finding.infer_again(survey.nodes, survey.channel, inside)
        return self._take(*finding_in_graph, survey, samples)

    def remembered(self, survey: Survey) -> Layouts:
        """The layouts by use, in a graph in which no value decides, or the same ones do."""
        return dict(zip(survey.uses, self.layouts, strict=True))

    def _take(
        self, finding: Finding, in_graph: PlacesInGraph, survey: Survey, samples: int
    ) -> Layouts | None:
        """Takes the layouts of some uses from their places, unless samples meet in some."""
        if in_graph.is_mixed:
            return None
        by_edge = [use for use, number in survey.uses.items() if number not in survey.enclosing]
        places = {**in_graph.uses, **{by_edge[i]: of_edge for i, of_edge in in_graph.edges.items()}}
        by_places: dict[object, Placement | None] = {}  # uses of equal places share a layout
        layouts = self.remembered(survey)
        for use, of_use in places.items():
            key = id(of_use), use.shape, use.dims, use.depth
            if key not in by_places:
                by_places[key] = layout_of_places(use, of_use, samples)
            layouts[use] = by_places[key]
        # The finding last: if memory has run out before, its constants differ in the next attempt.
        self.layouts = [layouts[use] for use in survey.uses]
        self.finding = finding
        return layouts


def _tells(survey: Survey, samples: int) -> dict[Any, Teller]:
    """What tells the places inside of the nodes that have uses there."""
    nodes = [survey.nodes[number] for number in survey.enclosing]
    return {node: partial(_told, survey, node, samples) for node in nodes}


def _told(survey: Survey, node: Any, samples: int, results: Sequence[Places | None]) -> Told | None:
    """What a call of a compiled part does with samples, if it does so whatever its values are."""
    calls = (x for x in calls_of(node) if x.recording.channel is survey.channel)
    call = next(calls, None)
    given = [None if x is None else regular_layout_of_places(x, samples) for x in results]
    if call is None or any(x and not layout for x, layout in zip(results, given, strict=True)):
        return None
    carried = call.carried(node, given)
    if carried is None:
        return None
    uses, inputs = carried
    shapes = [Edge(*edge).shape if edge[0] else () for edge in node.next_functions]
    return Told(
        {use: _places(use.shape, layout) for use, layout in uses.items()},
        {i: None if layout is None else _places(shapes[i], layout) for i, layout in inputs.items()},
    )


def _places(shape: Shape, layout: Folded) -> Places:
    """The places of a regular layout."""
    return Places.of(shape, layout.owners(torch.zeros((), device="cpu").expand(shape)))


def _mixed(finding: Finding, use: Use, survey: Survey) -> MixedSamplesError:
    """The error for a use that names the node which mixes its samples, or which is not known."""
    node = survey.nodes[finding.mixing]
    if finding.mixing not in finding.unknown:
        return _met_at(node, use, survey)
    name = _named(node, survey)
    if survey.channel.before_pass is None:
        return mixed_samples(use, f"{name} cannot be carried out alone to see what it does. ")
    reason = "as it may wait for other processes. "
    return mixed_samples(use, f"{name} is not carried out alone to see what it does, {reason}")


def _met_at(node: Any, use: Use, survey: Survey) -> MixedSamplesError:
    """The error for a use whose samples meet at a node."""
    return mixed_samples(use, f"{_named(node, survey)} is where they meet first. ")


def _named(node: Any, survey: Survey) -> str:
    """A node by its name, and by the parameters that it reads."""
    leaves = [getattr(child, "variable", None) for child, _ in node.next_functions]
    names = [f"`{name}`" for p, name in survey.names.items() if any(p is leaf for leaf in leaves)]
    reads = f", which reads {listed(names)}," if names else ""
    shape = tuple(node._input_metadata[0].shape)
    return f"`{node.name()}`, of a result of shape {shape}{reads}"
