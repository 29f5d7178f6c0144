"""The layouts of one call: the graph tells them, at once or in an earlier call."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from autogram._blocks import Folded, Limit, Placement
from autogram._capture.samples.inferred import Inferred, Layouts
from autogram._capture.samples.layouts import mixed_samples
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.replays import Flag, Replays
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use
from autogram._containers import Latest
from autogram.errors import MixedSamplesError, UnsupportedError


@dataclass(frozen=True)
class Remembered:
    """What an engine remembers of graphs, by a survey's key.

    It holds no tensor of a pass but copies of values that decide.
    """

    limit: Limit
    """How large one intermediate result may be."""
    inferred: Latest[bytes, Inferred] = field(default_factory=Latest)
    refusals: Latest[bytes, str] = field(default_factory=Latest)
    """Why samples count as mixed."""


class CallLayouts:
    """The layouts of one call, by what the engine remembers and what the graph tells.

    Args:
        remembered: What earlier calls have found.
        objectives: The objectives of the call.
        survey: The graph behind the objectives.
        replays: In a call that is captured into a CUDA graph, where comparisons are left; else
            ``None``.
    """

    def __init__(
        self,
        remembered: Remembered,
        objectives: Objectives,
        survey: Survey,
        replays: Replays | None,
    ) -> None:
        self._remembered, self._replays = remembered, replays
        self._objectives, self._survey = objectives, survey
        self._by_use: Layouts = {}
        self._changed: Flag | None = None  # whether values decide otherwise than they did
        self.is_remembered = survey.key in remembered.inferred
        """Whether the call goes by what earlier calls have shown."""

    def begin(self) -> None:
        """Finds the layouts, or recalls them.

        Raises:
            MixedSamplesError: Samples meet before they reach a use.
        """
        if (reason := self._remembered.refusals.get(self._survey.key)) is not None:
            raise MixedSamplesError(reason)
        inferred = self._remembered.inferred.get(self._survey.key)
        if inferred is not None and inferred.plan is not None:
            if inferred.plan.fits(self._survey.nodes):
                self._survey.read_by(inferred.plan)
            else:
                inferred = None
        if inferred is None:
            self._look()
        elif not inferred.finding.again:
            self._by_use = inferred.remembered(self._survey)
        else:
            self._compare(inferred)

    def _compare(self, inferred: Inferred) -> None:
        """Recalls the layouts, unless it is clear by now that values decide otherwise."""
        changes = inferred.changes(self._survey)
        if changes is not None and self._replays is not None:
            changes = self._replays.add(changes)
        changed = None if changes is None else Flag(changes)
        if changed is None or (changed.is_ready and changed.read()):
            self.look_again()
        else:
            self._by_use, self._changed = inferred.remembered(self._survey), changed

    def look_again(self) -> None:
        """Finds the layouts by the values that decide in this graph.

        Raises:
            MixedSamplesError: Samples meet before they reach a use.
        """
        self._changed = None
        self._refuse_capture()
        inferred = self._remembered.inferred[self._survey.key]
        layouts = inferred.look_again(self._survey, self._objectives.samples)
        if layouts is None:  # unless more is read
            self._look()
        else:
            self._by_use = layouts

    def _look(self) -> None:
        """Finds the layouts by a look at the whole graph."""
        self._refuse_capture()
        self._remembered.inferred.pop(self._survey.key, None)
        inferred, self._by_use = Inferred.of(
            self._survey, self._objectives, self._remembered.limit.elements
        )
        self._remembered.inferred[self._survey.key] = inferred

    def holds(self) -> bool:
        """Whether the layouts of the pass that was made were right; waits for comparisons."""
        return self._changed is None or not self._changed.read()

    def layout(self, use: Use, cotangent: Tensor) -> Placement | None:
        """The layout of a use with this cotangent ``(k, *output)``, or ``None`` if that is zero."""
        if (layout := self._by_use.get(use)) is not None:
            return layout
        if self._replays is None and bool((cotangent != 0).any()):
            raise mixed_samples(use, "The graph does not lead to this call. ")
        return None

    def regular(self, use: Use) -> Folded | None:
        """The layout of a use, if it is regular."""
        layout = self._by_use.get(use)
        return layout if isinstance(layout, Folded) else None

    @property
    def is_certain(self) -> bool:
        """Whether no comparison is waited for, so that one pass will do."""
        return self._changed is None or self._changed.is_ready

    def refuse(self, reason: str) -> None:
        """Remembers that the samples of such graphs count as mixed."""
        self._remembered.refusals[self._survey.key] = reason

    def _refuse_capture(self) -> None:
        """Refuses a captured call, in which the host can read nothing."""
        if self._replays is None:
            return
        raise UnsupportedError(
            "Run the captured step a few times eagerly. Call `engine.prepare_capture()` then. A "
            "step is captured into a CUDA graph, and it is not known where its samples are: no "
            "eager step had such a graph of calls, with such shapes, or a Function in Python "
            "decides."
        )
