"""Layouts that the graph tells: places of the samples at each use, inferred and remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from autogram._blocks import Placement
from autogram._capture.autograd.graph import calls_of
from autogram._capture.autograd.passes import Pass
from autogram._capture.places.finding import Finding, infer
from autogram._capture.places.inference import Edge, are_mixed
from autogram._capture.places.places import Places
from autogram._capture.samples.layouts import layouts_of_places, mixed_samples
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use
from autogram._containers import Latest
from autogram._errors import MixedSamplesError, listed


@dataclass(eq=False)
class Inferred:
    """The layouts of all uses in graphs of one key."""

    finding: Finding
    layouts: list[tuple[Placement, ...]]
    """Those of the last graph, in the order of the survey's uses."""

    @classmethod
    def of(cls, survey: Survey, objectives: Objectives) -> Inferred | None:
        """By a look at the whole graph; ``None`` if that does not tell them.

        Raises:
            MixedSamplesError: Samples meet before they reach a use.
        """
        layout, losses = objectives.layout, survey.losses
        # A compiled part, or one that is changed in place, may have uses that are not nodes.
        if layout is None or survey.may_hide_taps or any(map(calls_of, survey.nodes)):
            return None
        results = [of for node in survey.nodes for of in getattr(node, "_input_metadata", ())]
        if any(of.is_nested_tensor for of in results):
            return None  # their shapes tell nothing
        edges = [
            Edge(use.edge.node, use.edge.output_nr)
            if use in survey.tail
            else Edge(survey.nodes[number], 0)
            for use, number in survey.uses.items()
        ]
        root = Edge(losses.grad_fn, losses.output_nr)
        start = Places.along(losses.shape, layout.dim)
        with Pass(survey.channel).apart():
            finding, places = infer(root, start, survey.nodes, edges)
        inferred = cls(finding, [()] * len(edges))
        if inferred._take(finding, places, survey, objectives.samples):
            return inferred
        if finding.unknown:
            return None
        raise _mixed(finding.mixing, places, survey)

    def changes(self, survey: Survey) -> list[Tensor] | None:
        """Whether each value that decides is another one in a graph of this key, on its device.

        ``None`` where there are others that decide.
        """
        return None if self.finding.has_untold else self.finding.changes(survey.nodes)

    def look_again(self, survey: Survey, samples: int) -> bool:
        """Takes in the values that decide in a graph of this key. Says whether that was enough."""
        with Pass(survey.channel).apart():
            found = self.finding.infer_again(survey.nodes)
        return self._take(*found, survey, samples)

    def found(self, survey: Survey) -> dict[Use, tuple[Placement, ...]]:
        """The layouts by use."""
        return dict(zip(survey.uses, self.layouts, strict=True))

    def _take(
        self, finding: Finding, places: Mapping[int, Places | None], survey: Survey, samples: int
    ) -> bool:
        """Takes the layouts of some uses from their places, unless samples meet in some."""
        if are_mixed(places.values()):
            return False
        uses, layouts = [*survey.uses], [*self.layouts]
        known: dict[object, tuple[Placement, ...]] = {}  # uses of equal places share a layout
        for i, of_use in places.items():
            use = uses[i]
            key = id(of_use), use.shape, use.dims, use.depth
            if key not in known:
                known[key] = layouts_of_places(use, of_use, samples)
            layouts[i] = known[key]
        # The finding last: if memory has run out before, its constants differ in the next attempt.
        self.layouts, self.finding = layouts, finding
        return True


def _mixed(number: int, places: Mapping[int, Places | None], survey: Survey) -> MixedSamplesError:
    """The error that names the node which mixes the samples of a use, by its number."""
    use = next(use for i, use in enumerate(survey.uses) if are_mixed([places[i]]))
    node = survey.nodes[number]
    leaves = [getattr(child, "variable", None) for child, _ in node.next_functions]
    names = [f"`{name}`" for p, name in survey.names.items() if any(p is leaf for leaf in leaves)]
    reads = f", which reads {listed(names)}," if names else ""
    shape = tuple(node._input_metadata[0].shape)
    cause = f"`{node.name()}`, of a result of shape {shape}{reads} is where they meet first. "
    return mixed_samples(use, cause)


InferredByKey = Latest[bytes, Inferred | None]
"""By a survey's key; ``None`` where inference does not tell enough."""
