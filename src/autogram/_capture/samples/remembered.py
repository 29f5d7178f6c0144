"""Where samples lay in earlier calls of an engine, and when that holds again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from autogram._blocks import Folded, Partial, Placement
from autogram._capture.samples.inferred import Inferred, InferredByKey
from autogram._capture.samples.layouts import layouts_of_owners
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.proofs.moves import SEVERAL
from autogram._capture.samples.proofs.proof import Constant, Proof
from autogram._capture.samples.proofs.spots import Layouts
from autogram._capture.samples.proofs.trials import keeps_places
from autogram._capture.samples.replays import copied_to_cpu
from autogram._capture.samples.survey import Survey
from autogram._containers import Latest

_ANY_SIZES = b""  # the key of a proof that is for one call, whatever the sizes are
# Under that key, where there are proofs for graphs of the same sizes: at others, values decide.
_OF_SIZES = Proof(is_for_one_call=True)
_FOR_GOOD = Proof(is_for_one_call=True)  # under that key, where samples were moved by what is tried
_FEW = 4  # what is new so often may be new each time

InOrder = tuple[tuple[Placement, ...], ...]
"""The layouts that fit each use, in the order of a survey; none without a cotangent."""

Constants = dict[Constant, Tensor]
"""The constants that layouts depend on, with their values when the layouts were found."""


@dataclass
class Known:
    """The layouts that were found for one graph, with what they depend on.

    If they ``are_doubted``, the samples are searched for again before the layouts are used.
    """

    layouts: InOrder
    constants: Constants
    proof: Proof
    are_doubted: bool = False

    def recall(self, survey: Survey, samples: int) -> tuple[Layouts, list[Tensor]] | None:
        """The layouts, by use, and comparisons: booleans, none of which may be true.

        ``None`` where it is not known where values take samples now, or these meet.
        """
        found = dict(zip(survey.uses, self.layouts, strict=True))
        changes = [_differ(constant.value(survey), old) for constant, old in self.constants.items()]
        if not self.proof.routes.hops:
            return found, changes
        if (routed := self.proof.routes.owners(survey)) is None:
            return None
        owners, clashes = routed
        copies = copied_to_cpu(owners.values())
        several: dict[torch.Size, list[tuple[Tensor, tuple[Placement, ...]]]] = {}
        for use, number in survey.uses.items():
            if number in owners:
                own = copies[owners[number]]
                if own.dim() and 0 not in use.dims:
                    return None
                # Most uses have the owners of another one, and share its layout. Those of many
                # experts differ in size, and to compare each with all others would take long.
                known = several.setdefault(own.shape, [])
                layouts = next((x for other, x in known if torch.equal(other, own)), None)
                if layouts is None:
                    if bool((own == SEVERAL).any()):
                        return None
                    layouts = layouts_of_owners(use, own, samples)
                    known.append((own, layouts))
                found[use] = layouts
        return found, [*changes, *clashes]

    def outlasts(self, survey: Survey, samples: int, changes: Sequence[Tensor]) -> bool:
        """Whether the layouts hold although some of the ``changes`` of `recall` are true.

        So they do if only constants have changed, and each node that saved them keeps samples where
        they are all the same, as an index that takes other places of each sample.
        """
        pairs = zip(self.constants, changes, strict=False)  # behind those, samples that meet
        nodes = {constant.node for constant, change in pairs if bool(change)}
        trials = [trial for trial in self.proof.moving if trial.node in nodes]
        if len(trials) < len(nodes) or any(map(bool, changes[len(self.constants) :])):
            return False
        if not all(keeps_places(survey, trial, samples) for trial in trials):
            return False
        self.constants = {x: x.value(survey).clone() for x in self.constants}
        return True


@dataclass
class Shown:
    """What the calls of one graph have shown together, where few samples reach some uses.

    A use that few samples reach fits a regular layout, and one of these samples alone, as of a
    layer that is called for them. Where no value moves samples, each call shows the same layout, by
    the samples that reach the use in this call. A regular layout that fits in each call is right
    if more than half of the samples have shown it.
    """

    constants: Constants
    # For each use by number, the regular layouts that have fitted so far, and the samples.
    uses: dict[int, tuple[tuple[Folded, ...], frozenset[int]]] = field(default_factory=dict)

    def is_of_others(self, constants: Constants) -> bool:
        """Whether other constants decide, as a later proof may say, or they have other values."""
        if constants.keys() != self.constants.keys():
            return True
        return any(bool(_differ(constants[x], old)) for x, old in self.constants.items())

    def add(self, found: InOrder) -> InOrder | None:
        """Adds what fits in a call. Returns layouts to remember, or ``None`` to wait for more.

        Where a call shows no new sample, its layouts serve the next one as long as they agree on
        all places that have a cotangent.
        """
        layouts: list[tuple[Placement, ...]] = []
        are_certain, is_new = True, False
        for number, fitting in enumerate(found):
            regular, samples = self.uses.get(number, ((), frozenset()))
            if fitting:
                now = tuple([x for x in fitting if isinstance(x, Folded)])
                regular = tuple([x for x in now if not samples or x in regular])
                if not regular:
                    return None
                few = [x.subset.samples for x in fitting if isinstance(x, Partial)]
                there = frozenset(few[0] if few else range(regular[0].batch))
                is_new |= not there <= samples
                samples |= there
                self.uses[number] = regular, samples
            is_certain = 2 * len(samples) > regular[0].batch if regular else False
            are_certain &= is_certain
            layouts.append(regular if is_certain else fitting)
        return tuple(layouts) if are_certain or not is_new else None


@dataclass
class _Structure:
    """What is remembered of graphs of one structure."""

    proofs: Latest[bytes, Proof] = field(default_factory=Latest)  # by `RememberedGraph._proof_keys`
    free: bytes = b""  # the nodes whose sizes are in no key, where there are routes
    # The keys of graphs that were seen while proofs were for graphs of the same sizes.
    unproven: Latest[bytes, None] = field(default_factory=Latest)
    news: int = 0  # how often values decided, or sizes were new where there are routes


@dataclass(frozen=True)
class Remembered:
    """What an engine remembers of graphs. It holds no tensor of a pass but constants.

    Layouts, what calls have shown of them, what was inferred, and reasons why samples count as
    mixed (refusals), are kept by a survey's key.
    """

    structures: Latest[bytes, _Structure] = field(default_factory=Latest)
    layouts: Latest[bytes, Known] = field(default_factory=Latest)
    shown: Latest[bytes, Shown] = field(default_factory=Latest)
    refusals: Latest[bytes, str] = field(default_factory=Latest)
    inferred: InferredByKey = field(default_factory=InferredByKey)


class RememberedGraph:
    """What an engine remembers of the graph of one call.

    That is, the layouts if they are ``known``, or the ``refusal``: why samples count as mixed.
    """

    def __init__(self, remembered: Remembered, survey: Survey, objectives: Objectives) -> None:
        self._all, self._survey, self._objectives = remembered, survey, objectives
        structure = remembered.structures.get(survey.structure)
        if structure is None:
            structure = remembered.structures[survey.structure] = _Structure()
        self._structure, self._key = structure, survey.key
        if structure.free:
            self._key = survey.key_without(structure.free)  # of nodes on a route
        self.known = remembered.layouts.get(survey.key) or remembered.layouts.get(self._key)
        self.refusal = remembered.refusals.get(self._key)

    @property
    def is_inferred(self) -> bool:
        """Whether an earlier call has looked at a graph of this key."""
        return self._survey.key in self._all.inferred

    def inferred(self, objectives: Objectives) -> tuple[Inferred | None, Layouts | None, bool]:
        """What the graph tells, if that is enough, and whether an earlier call has found it.

        With the layouts of this graph, if it was looked at.
        """
        key, inferred = self._survey.key, self._all.inferred
        if self.is_inferred:
            return inferred[key], None, True
        inferred[key], layouts = Inferred.of(self._survey, objectives) or (None, None)
        return inferred[key], layouts, False

    def forget_inferred(self, *, for_good: bool) -> None:
        """Forgets what was inferred; for good where the graph does not tell enough."""
        self._all.inferred.pop(self._survey.key, None)
        if for_good:
            self._all.inferred[self._survey.key] = None

    def refuse(self, reason: str) -> None:
        """Remembers that the samples are mixed."""
        self._all.refusals[self._key] = reason

    def forget_layouts(self, *, and_what_was_shown: bool = True) -> None:
        """Forgets the layouts, as they were wrong."""
        self.known = None
        for key in (self._key, self._survey.key):
            self._all.layouts.pop(key, None)
            if and_what_was_shown:
                self._all.shown.pop(key, None)

    @property
    def proof(self) -> Proof | None:
        """What the layouts depend on, if a graph of this structure was looked at."""
        return next(filter(None, map(self._structure.proofs.get, self._proof_keys)), None)

    @property
    def lasting_proof(self) -> Proof | None:
        """The proof, if it lets layouts be remembered."""
        proof = self.proof
        if proof is None or proof.is_for_one_call:
            return None
        # A node is tried with one cotangent, and a batched pass has several.
        return None if proof.trials and self._objectives.per_sample > 1 else proof

    def keep_proof(self, proof: Proof) -> None:
        """Remembers a proof, for graphs of those sizes that it is for."""
        of = self._structure
        before = of.proofs.get(_ANY_SIZES)
        if before is _FOR_GOOD:
            return
        if not proof.is_for_one_call and before is not _OF_SIZES:
            of.proofs.pop(_ANY_SIZES, None)  # what values decided then was an accident
        if proof.routes.hops:
            of.free = proof.routes.free
            self._key = self._survey.key_without(of.free)
            self.known = self._all.layouts.get(self._key)
        if proof.is_for_sizes or (proof.is_for_one_call and of.free):
            if of.proofs.get(_ANY_SIZES, _OF_SIZES) is _OF_SIZES:
                of.proofs[_ANY_SIZES] = _OF_SIZES
                of.proofs[self._key if proof.routes.hops else self._survey.key] = proof
        else:
            of.proofs[_ANY_SIZES if proof.is_for_one_call else self._pattern] = proof

    def forget_proof(self, *, for_good: bool) -> None:
        """Forgets what the layouts depend on; for good where a new proof would be no better."""
        for key in self._proof_keys:
            self._structure.proofs.pop(key, None)
        if for_good:
            self._structure.proofs[_ANY_SIZES] = _FOR_GOOD

    def wants_proof(self) -> bool:
        """Notes the call, and tells whether to prove what the graph depends on in it.

        This is for graphs whose structure has proofs for some sizes, or for one call. A proof is
        worth its passes where sizes come again. Where values decide, or sizes are new, time and
        again, more may be found by now: samples may have had regular places by accident then.
        """
        of, proof = self._structure, self.proof
        if proof is None or proof is _FOR_GOOD or not proof.is_for_one_call:
            return False
        if proof is _OF_SIZES:
            if self._key in of.unproven:
                return True
            of.unproven[self._key] = None
        of.news += bool(of.free) or proof is not _OF_SIZES
        return of.news >= _FEW and of.news & (of.news - 1) == 0

    def doubt(self) -> None:
        """Lets the next call search again."""
        if self.known is not None:
            self.known.are_doubted = True

    def keep_layouts(self, found: Layouts) -> None:
        """Keeps layouts for the next call, if all that can change them is noticed."""
        proof, survey = self.lasting_proof, self._survey
        if proof is None or survey.may_hide_taps:
            return
        samples = self._objectives.samples
        if not proof.is_about(survey, found):
            return
        if not all(keeps_places(survey, trial, samples) for trial in proof.moving):
            return
        found = proof.routes.others(survey, found)
        layouts = tuple(found.get(use, ()) for use in survey.uses)
        constants = {x: x.value(survey).clone() for x in proof.constants}
        # Sizes of other nodes may decide where a route is for others.
        is_free = proof.routes.free == self._structure.free
        key = self._key if is_free else survey.key
        together: InOrder | None = layouts
        shown = self._all.shown.get(key)
        if shown is not None or not all(isinstance(x, Folded) for some in layouts for x in some):
            if shown is None or shown.is_of_others(constants):
                shown = self._all.shown[key] = Shown(constants)
            together = shown.add(layouts)
        if together is not None:
            self.known = self._all.layouts[key] = Known(together, constants, proof)

    @cached_property
    def _pattern(self) -> bytes:
        """The pattern of sizes."""
        return self._survey.pattern(self._objectives.samples)

    @property
    def _proof_keys(self) -> tuple[bytes, ...]:
        """Keys of proofs, the first of which counts.

        The first key has all sizes, and the second all but those of nodes on a route. A proof for
        one call, whatever the sizes are, comes next. The last key has a pattern of sizes: at other
        sizes, samples may lie along other dimensions, which nodes may not carry.
        """
        return self._survey.key, self._key, _ANY_SIZES, self._pattern


def _differ(new: Tensor, old: Tensor) -> Tensor:
    """Whether two tensors differ, as a tensor on their device."""
    if new.shape != old.shape or new.device != old.device:
        return torch.ones((), dtype=torch.bool, device="cpu")
    return (new != old).any()
