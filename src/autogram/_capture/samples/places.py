"""Places: where the samples lie in each use, remembered, or sought where the graph is new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from autogram._blocks import Folded, Placement, agree
from autogram._capture.recording import Channel
from autogram._capture.samples.answer import Answer
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.owners import Scales
from autogram._capture.samples.probe import Layouts, find_layouts, fitting_layouts, hide_places
from autogram._capture.samples.proof import Proof, Silence, Spot, Spots, Watch
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use, describe
from autogram._errors import MixedSamplesError, NonFiniteError

K = TypeVar("K")
T = TypeVar("T")
Key = tuple[bytes, int | None]
Proven = tuple[bytes, int | None, bytes]

# How many graphs to remember layouts for. Batches of varying length have one each; a forgotten one
# costs a backward pass through the activations.
REMEMBERED = 512


class UnknownLayoutError(Exception):
    """It is not known where the samples of a use lie.

    Attributes:
        use: The use, or ``None`` where nothing is known.
        is_needed: Whether it has a cotangent, so that a layout must be found.
    """

    def __init__(self, use: Use | None, *, is_needed: bool) -> None:
        super().__init__(use and use.function)
        self.use = use
        self.is_needed = is_needed


@dataclass
class Known:
    """The layouts that were found for one graph."""

    layouts: dict[int, tuple[Placement, ...]]
    """Of each use, by the number of its tap in the survey."""
    constants: tuple[tuple[Watch, Tensor], ...]
    """What they depend on, beside the graph."""
    silent: tuple[Spot, ...]
    """The places that had no cotangent."""
    is_doubted: bool = False
    """Whether to look again before they are used."""

    def has_changed(self, survey: Survey) -> Answer | None:
        """Whether constants have other values than when the layouts were found.

        Returns:
            The answer, or ``None`` where their shapes or devices tell that they have.
        """
        pairs = [(watch.value(survey), value) for watch, value in self.constants]
        if any(new.shape != old.shape or new.device != old.device for new, old in pairs):
            return None
        return Answer([(new != old).any() for new, old in pairs])

    def of_uses(self, survey: Survey) -> Layouts:
        """The layouts, by use."""
        return {use: self.layouts.get(number, ()) for use, number in survey.uses.items()}


class Places:
    """What an engine remembers of layouts, refusals and proofs. It holds no tensor of a pass.

    Args:
        channel: The channel of the engine's taps.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._known: dict[Key, Known] = {}
        self._mixed: dict[Key, str] = {}
        self._proofs: dict[Proven, Proof] = {}

    def search(self, objectives: Objectives, survey: Survey) -> Search:
        """The search of one call."""
        return Search(self, objectives, survey)

    def recall(self, objectives: Objectives, survey: Survey) -> Known | None:
        """What was found for this graph."""
        return self._known.get(_key(objectives, survey))

    def remember(
        self, objectives: Objectives, survey: Survey, layouts: Layouts, *, hides: bool
    ) -> None:
        """Keeps layouts for the next call, if nothing can change them that is not noticed.

        Args:
            objectives: The losses with their samples.
            survey: The graph behind them.
            layouts: What was found.
            hides: Whether some places had no cotangent. Where constants move samples, these may
                belong to others than a regular layout says.
        """
        proof = self.proof(objectives, survey)
        is_regular = all(isinstance(x, Folded) for some in layouts.values() for x in some)
        if proof is None or proof.movers or survey.hides_taps or not is_regular:
            return
        if proof.watches and hides:
            return
        if proof.silent and objectives.per_sample > 1:
            return  # a batched pass hides the values that would show that this is over
        by_number = {survey.uses[use]: found for use, found in layouts.items()}
        constants = tuple((watch, watch.value(survey).clone()) for watch in proof.watches)
        _put(self._known, _key(objectives, survey), Known(by_number, constants, proof.silent))

    def doubt(self, objectives: Objectives, survey: Survey) -> None:
        """Lets the next call for this graph look again."""
        known = self._known.get(_key(objectives, survey))
        if known is not None:
            known.is_doubted = True

    def proof(self, objectives: Objectives, survey: Survey) -> Proof | None:
        """What the places depend on, if a graph of this structure was looked at.

        At other sizes, samples may lie along other dimensions, which nodes may not carry.
        """
        found = (self._proofs.get(key) for key in _proven(objectives, survey))
        return next((proof for proof in found if proof is not None), None)

    def prove(self, objectives: Objectives, survey: Survey, proof: Proof) -> None:
        """Keeps a proof for graphs of the same structure."""
        whatever_sizes, these = _proven(objectives, survey)
        _put(self._proofs, whatever_sizes if proof.movers else these, proof)

    def forget(self, objectives: Objectives, survey: Survey) -> None:
        """Forgets what was found for this graph."""
        self._known.pop(_key(objectives, survey), None)

    def disprove(self, objectives: Objectives, survey: Survey) -> None:
        """Forgets a proof, and what rests on it."""
        self.forget(objectives, survey)
        for key in _proven(objectives, survey):
            self._proofs.pop(key, None)

    def refuse(self, objectives: Objectives, survey: Survey, reason: str) -> None:
        """Keeps in mind that the samples are mixed in this graph."""
        _put(self._mixed, _key(objectives, survey), reason)

    def check(self, objectives: Objectives, survey: Survey) -> None:
        """Raises if it is known that the samples are mixed in this graph."""
        reason = self._mixed.get(_key(objectives, survey))
        if reason is not None:
            raise MixedSamplesError(reason)


class Search:
    """The layouts of one call: what is remembered, and what is found on the way.

    Where a graph of this structure has a proof, and its sizes or constants are new, one pass by
    scales comes first, and the pass that asks for layouts is what it is compared with (with several
    objectives for a sample, another one is). Else the samples are sought by zeros.

    Args:
        places: What is remembered.
        objectives: The losses with their samples.
        survey: The graph behind them.

    Attributes:
        has_sought: Whether there was anything to seek.
    """

    def __init__(self, places: Places, objectives: Objectives, survey: Survey) -> None:
        self._places = places
        self._objectives = objectives
        self._survey = survey
        self._found: Layouts | None = None
        self._has_changed: Answer | None = None
        self._silent: tuple[Spot, ...] = ()
        self._silence: Silence | None = None
        self._scales: Scales | None = None
        self._needed: set[Use] = set()
        self._hides = False
        self.has_sought = False

    def layout(self, use: Use, cotangent: Tensor) -> Placement | None:
        """The layout of a use with this cotangent ``(k, *output)``, or ``None`` if that is zero.

        Raises:
            UnknownLayoutError: It must be sought first.
        """
        if not cotangent.numel():
            return None  # an expert without tokens, say
        if self._found is None:
            raise UnknownLayoutError(use, is_needed=False)
        if self._scales is not None and use not in self._found:
            self._found[use] = self._measure(self._scales, use, cotangent[0])
        layouts: Sequence[Placement] = self._found.get(use, ())
        if len(layouts) == 1 and isinstance(layouts[0], Folded):
            return layouts[0]
        # It had no cotangent so far (a branch with weights of zero, say), or one that left several
        # layouts possible (at a single token, say). This one may tell more.
        has_cotangent = (cotangent != 0).any(0)
        if layouts and agree(layouts, has_cotangent):
            return layouts[0]
        if bool(has_cotangent.any()):
            raise UnknownLayoutError(use, is_needed=True)
        return None

    @property
    def is_settled(self) -> bool:
        """Whether the layout of every use is known, whatever its cotangent will be."""
        found = self._found
        is_open = self._scales is not None or self._survey.hides_taps or bool(self._silent)
        must_wait = self._has_changed is not None and not self._has_changed.is_there
        if found is None or is_open or must_wait:
            return False
        each = (found.get(use, ()) for use in self._survey.uses)
        return all(len(x) == 1 and isinstance(x[0], Folded) for x in each)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches, in the pass inside of a block, what had no cotangent when it was proven."""
        self._silence = Silence(self._survey, self._silent)
        with self._silence.watched():
            yield

    def begin(self) -> None:
        """Recalls where the samples were, or looks for them."""
        known = self._places.recall(self._objectives, self._survey)
        if known is not None and not known.is_doubted:
            has_changed = known.has_changed(self._survey)
            if has_changed is not None and not (has_changed.is_there and has_changed.read()):
                self._found, self._has_changed = known.of_uses(self._survey), has_changed
                self._silent = known.silent
        if self._found is None and self._survey.uses:
            self.seek(UnknownLayoutError(None, is_needed=False))

    def seek(self, unknown: UnknownLayoutError) -> None:
        """Looks for the samples, by passes of its own."""
        self.has_sought = True
        objectives = self._objectives
        use = unknown.use if unknown.is_needed else None
        if use is not None and use in self._needed:
            raise MixedSamplesError(
                f"{describe(use)} has a cotangent for single objectives where it has none for some "
                "of them together, so that it cannot be seen where the samples lie. Pass "
                "`batch_dim=None` to `Engine`."
            )
        if use is not None:
            self._places.forget(objectives, self._survey)
        proof = self._places.proof(objectives, self._survey)
        self._scales = self._has_changed = None
        self._silent = ()
        try:
            if use is not None or proof is None or not bool(objectives.is_finite.all()):
                self._needed.update([use] if use is not None else [])
                self._find(use, is_known=False)
            elif objectives.per_sample > 1:
                self._find(None, is_known=True)
            else:
                self._begin_scales(proof)
        except NonFiniteError:
            known = self._places.recall(objectives, self._survey)
            if known is None:
                raise
            self._found = known.of_uses(self._survey)

    def _begin_scales(self, proof: Proof) -> None:
        """Has the next pass compared with passes by scales, if their numbers are not too large."""
        try:
            self._scales, self._found = Scales(self._places.channel, self._objectives), {}
        except NonFiniteError:
            self._find(None, is_known=False)
        else:
            self._silent = proof.silent

    def finish(self) -> None:
        """Remembers what the pass has shown.

        Raises:
            UnknownLayoutError: It has not shown all of it.
        """
        if self._has_changed is not None and self._has_changed.read():
            self._has_changed = None
            raise UnknownLayoutError(None, is_needed=False)
        if self._silence is not None and self._silence.is_broken:
            self._places.disprove(self._objectives, self._survey)
            if not self.has_sought:
                raise UnknownLayoutError(None, is_needed=False)
        if self._scales is None or self._found is None:
            return
        for use in self._scales.uses:
            if use not in self._found:
                raise UnknownLayoutError(use, is_needed=True)  # all samples add up to zero
        hides = self._hides
        self._places.remember(self._objectives, self._survey, self._found, hides=hides)

    def _measure(self, scales: Scales, use: Use, cotangent: Tensor) -> tuple[Placement, ...]:
        """The layouts of a use that this pass and the one before show together."""
        owners = scales.owners(use, cotangent)
        if not owners:
            raise UnknownLayoutError(use, is_needed=True)
        layouts = fitting_layouts(use, owners, self._objectives.is_finite)
        self._hides |= hide_places(layouts, owners)
        return layouts

    def _find(self, wanted: Use | None, *, is_known: bool) -> None:
        """Finds the layouts of all uses, and remembers them."""
        places, objectives, survey = self._places, self._objectives, self._survey
        spots = None if is_known else Spots(survey)
        proven = places.proof(objectives, survey) if is_known else None
        silence = Silence(survey, proven.silent if proven else ())
        with silence.watched():
            self._found, proof, hides = find_layouts(places.channel, objectives, wanted, spots)
        if silence.is_broken:
            places.disprove(objectives, survey)
        if bool(objectives.is_finite.all()):  # else true for this call alone
            if proof is not None:
                places.prove(objectives, survey, proof)
            places.remember(objectives, survey, self._found, hides=hides)


def _key(objectives: Objectives, survey: Survey) -> Key:
    """What layouts may depend on, but for values."""
    return survey.key, objectives.batch_dim


def _proven(objectives: Objectives, survey: Survey) -> tuple[Proven, Proven]:
    """What a proof is kept by, if nothing is remembered whatever the sizes, and otherwise."""
    structure, batch_dim = survey.structure, objectives.batch_dim
    return (structure, batch_dim, b""), (structure, batch_dim, survey.pattern(objectives.samples))


def _put(memory: dict[K, T], key: K, value: T) -> None:
    """Adds an entry to a memory, in the place of the oldest if it is full."""
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
