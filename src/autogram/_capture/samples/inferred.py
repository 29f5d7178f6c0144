"""Layouts that the graph tells: places of the samples at each use, inferred and remembered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from autogram._blocks import Placement
from autogram._capture.autograd.graph import calls_of
from autogram._capture.places.finding import Finding, infer
from autogram._capture.places.inference import Edge
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
        edges = [
            Edge(use.edge.node, use.edge.output_nr)
            if use in survey.tail
            else Edge(survey.nodes[number], 0)
            for use, number in survey.uses.items()
        ]
        root = Edge(losses.grad_fn, losses.output_nr)
        start = Places.along(losses.shape, layout.dim)
        finding = infer(root, start, survey.nodes, edges)
        if finding.is_mixed:
            if finding.unknown:
                return None
            raise _mixed(finding, survey)
        inferred = cls(finding, [()] * len(edges))
        inferred._take(range(len(edges)), survey, objectives.samples)
        return inferred

    def changes(self, survey: Survey) -> list[Tensor] | None:
        """Whether each value that decides is another one in a graph of this key, on its device.

        ``None`` where there are others that decide.
        """
        return None if self.finding.has_untold else self.finding.changes(survey.nodes)

    def look_again(self, survey: Survey, samples: int) -> bool:
        """Takes in the values that decide in a graph of this key. Says whether that was enough."""
        self._take(self.finding.infer_again(survey.nodes), survey, samples)
        return not self.finding.is_mixed

    def found(self, survey: Survey) -> dict[Use, tuple[Placement, ...]]:
        """The layouts by use."""
        return dict(zip(survey.uses, self.layouts, strict=True))

    def _take(self, changed: range | list[int], survey: Survey, samples: int) -> None:
        """Takes the layouts of some uses from their places."""
        if self.finding.is_mixed:
            return
        uses = [*survey.uses]
        known: dict[object, tuple[Placement, ...]] = {}  # uses of equal places share a layout
        for i in changed:
            places, use = self.finding.places[i], uses[i]
            key = id(places), use.shape, use.dims, use.depth
            if key not in known:
                known[key] = layouts_of_places(use, places, samples)
            self.layouts[i] = known[key]


def _mixed(finding: Finding, survey: Survey) -> MixedSamplesError:
    """The error that names the node which mixes the samples of a use."""
    pairs = zip(survey.uses, finding.places, strict=True)
    use = next(use for use, places in pairs if places is not None and places.is_mixed)
    node = survey.nodes[finding.mixing]
    leaves = [getattr(child, "variable", None) for child, _ in node.next_functions]
    names = [f"`{name}`" for p, name in survey.names.items() if any(p is leaf for leaf in leaves)]
    reads = f", which reads {listed(names)}," if names else ""
    shape = tuple(node._input_metadata[0].shape)
    return mixed_samples(
        use, f"`{node.name()}`, of a result of shape {shape}{reads} is where they meet first. "
    )


InferredByKey = Latest[bytes, Inferred | None]
"""By a survey's key; ``None`` where inference does not tell enough."""
