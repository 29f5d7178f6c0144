"""The search: layouts of one call, recalled where the graph is known, and otherwise found."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

from autogram._blocks import Folded, Partial, Placement, agree
from autogram._capture.samples.layouts import fitting_layouts, regular_layouts
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.owners import Scales, are_none, owners_by_zeros, show_uses
from autogram._capture.samples.proofs.proof import Proof, Prover
from autogram._capture.samples.proofs.regular import narrowed
from autogram._capture.samples.proofs.spots import Layouts, Spot, shown, spots_of, ways_to_taps
from autogram._capture.samples.proofs.trials import tried
from autogram._capture.samples.remembered import Known, Remembered, RememberedGraph
from autogram._capture.samples.replays import Flag, Replays
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use, describe
from autogram._errors import MixedSamplesError, NonFiniteError, UnsupportedError


class UnknownLayoutError(Exception):
    """It is not known where the samples of a use lie that has a cotangent, or of some use."""

    def __init__(self, use: Use | None = None) -> None:
        super().__init__()
        self.use = use


class Search:
    """The layouts of one call: those that are remembered, and those that are found in its passes.

    Without a proof for graphs of this structure, the search is by zeros. With a proof, and
    new sizes or constants, passes by scales are made first, and are compared with the pass that
    asks for layouts (or with another pass, if samples have several objectives).

    Args:
        remembered: The layouts and proofs of earlier calls.
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
        self.graph = RememberedGraph(remembered, survey, objectives)
        self._replays = replays
        self._objectives = objectives
        self._survey = survey
        self._needed: set[Use] = set()
        self._are_apart = False
        self._forget()
        self.has_searched = False
        self.is_remembered = True  # whether earlier calls have shown what this one goes by

    def _forget(self) -> None:
        """Begins with nothing found."""
        self._found: Layouts = {}
        self._has_changed: Flag | None = None  # without constants, nothing can
        self._changes: list[Tensor] = []
        self._watched = Proof()  # whose spots and nodes the pass watches
        self._routed: frozenset[int] = frozenset()  # taps whose layouts were computed by routes
        self._heard: list[Tensor] = []
        self._moved: list[Tensor] = []
        self._scales: Scales | None = None
        self._is_proven = False  # by what an earlier search has shown; always so with scales
        self._is_inferred = False  # from the graph

    def begin(self) -> None:
        """Recalls where the samples were, or searches for them."""
        if (reason := self.graph.refusal) is not None:
            raise MixedSamplesError(reason)
        if self._infer():
            return
        known = self.graph.known
        # In a captured call, the host cannot read what a trial finds, or where routes lead.
        is_read = known is not None and bool(known.proof.trials or known.proof.routes.hops)
        if known is not None and not (known.are_doubted if self._replays is None else is_read):
            self._recall(known)
        if not self._found and self._survey.uses:
            self.run()

    def _infer(self, *, is_changed: bool = False) -> bool:
        """Lets the graph tell the layouts of all uses, and says whether it does."""
        survey, objectives = self._survey, self._objectives
        if self._replays is not None and not self.graph.is_inferred:
            return False  # a captured call can read nothing
        inferred, layouts, is_known = self.graph.inferred(objectives)
        if inferred is None:
            return False
        if is_known and inferred.finding.again:
            changes = inferred.changes(survey)
            changed = self._flag(changes) if changes is not None and not is_changed else None
            if self._replays is not None:
                if changed is None:
                    return False
            elif changed is None or (changed.is_ready and changed.read()):
                changed = None
                layouts = inferred.look_again(survey, objectives.samples)
                if layouts is None:
                    self.graph.forget_inferred(for_good=False)
                    inferred, layouts, _ = self.graph.inferred(objectives)
                    if inferred is None:
                        return False
            self._has_changed = changed
        self._found = inferred.found(survey) if layouts is None else layouts
        self._is_inferred = True
        self.is_remembered = is_known
        return True

    def _recall(self, known: Known) -> None:
        """Recalls where the samples were, unless it is clear by now that they are elsewhere."""
        recalled = known.recall(self._survey, self._objectives.samples)
        if recalled is not None:
            found, self._changes = recalled
            changed = self._has_changed = self._flag(self._changes) if self._changes else None
            if changed is None or not changed.is_ready or self._holds(changed):
                self._found, self._watched = found, known.proof
                self._routed = known.proof.routes.taps

    def _holds(self, changed: Flag) -> bool:
        """Whether what was recalled holds, by what the comparisons say."""
        if not changed.read():
            return True
        known, self._has_changed = self.graph.known, None
        if self._is_inferred or known is None or self._replays is not None:
            return False
        return known.outlasts(self._survey, self._objectives.samples, self._changes)

    def layout(self, use: Use, cotangent: Tensor) -> Placement | None:
        """The layout of a use with this cotangent ``(k, *output)``, or ``None`` if that is zero."""
        if not self._found and not self.has_searched:
            raise UnknownLayoutError
        if self._scales is not None and use not in self._found:
            self._measure(use, cotangent[0])
        layouts = self._found.get(use, ())
        if len(layouts) == 1 and (isinstance(layouts[0], Folded) or self._is_certain(use)):
            return layouts[0]
        if self._replays is not None:
            raise UnknownLayoutError(use)  # each replay may have another cotangent
        # The use had no cotangent so far (a branch with weights of zero, say), or a cotangent that
        # several layouts fit (at a single token, say). This cotangent may fit fewer.
        if layouts and agree(layouts, cotangent):
            return layouts[0]
        if bool((cotangent != 0).any()):
            # Of few samples, a pass by scales shows enough.
            is_of_few = not self.has_searched and any(isinstance(x, Partial) for x in layouts)
            raise UnknownLayoutError(None if is_of_few else use)
        return None

    def regular(self, use: Use) -> Folded | None:
        """The only layout that a use can have, whatever its cotangent is, if there is one."""
        layouts = self._found.get(use, ()) if self._scales is None else ()
        only = layouts[0] if len(layouts) == 1 else None
        return only if isinstance(only, Folded) else None

    def _is_certain(self, use: Use) -> bool:
        """Whether a use has the layout that was found, whatever its cotangent is."""
        layouts = self._found.get(use, ())
        if len(layouts) != 1:
            return False
        if self._is_inferred:
            return True
        return isinstance(layouts[0], Folded) or self._survey.uses.get(use) in self._routed

    @property
    def knows_all(self) -> bool:
        """Whether the layout of every use is known, whatever its cotangent will be."""
        is_watched = self._watched.silent or self._watched.trials
        if not self._found or is_watched or self._survey.may_hide_taps:
            return False
        if self._is_proven:  # what is to be remembered is read from the graph behind the pass
            return False
        is_certain = self._has_changed is None or self._has_changed.is_ready
        return is_certain and all(map(self._is_certain, self._survey.uses))

    @property
    def how(self) -> str:
        """How the layouts are known: inferred, from an earlier call, or by a search in this one."""
        if self.has_searched:
            return "search"
        return "inferred" if self._is_inferred else "remembered"

    @property
    def is_known(self) -> bool:
        """Whether a call for an equal graph needs no search."""
        return self._is_inferred or self.graph.known is not None

    def watched(self) -> AbstractContextManager[object]:
        """Watches spots whose cotangent was zero in the pass inside of a block, and tries nodes."""
        heard, moved = self._heard, self._moved = [], []
        silent, trials = self._watched.silent, self._watched.trials
        if not (silent or trials):
            return nullcontext()

        def hear(_: Spot, cotangent: Tensor) -> None:
            heard.append((cotangent != 0).any())

        def tell(moves: Tensor, stays: Tensor) -> None:
            moved.append(moves)
            heard.append(~stays)

        stack = ExitStack()
        stack.enter_context(shown(self._survey, silent, hear))
        stack.enter_context(tried(self._survey, trials, self._objectives.samples, tell))
        return stack

    def _flag(self, values: Sequence[Tensor]) -> Flag:
        """Whether any of some booleans is true; in a captured call, the replays are asked later."""
        return Flag(values if self._replays is None else self._replays.add(values))

    def finish(self) -> None:
        """Ends a pass, and remembers the layouts that it has shown."""
        if self._has_changed is not None and not self._holds(self._has_changed):
            raise UnknownLayoutError
        if self._heard and self._flag(self._heard).read():
            self.graph.forget_layouts()
            # What has moved samples may do so again.
            has_moved = bool(self._moved) and self._flag(self._moved).read()
            self.graph.forget_proof(for_good=has_moved)
            if not self.has_searched:
                raise UnknownLayoutError
        if self._scales is not None:
            for use in self._scales.uses:
                if use not in self._found:
                    raise UnknownLayoutError(use)  # the cotangents of all samples add up to zero
        if self._is_proven:
            self.graph.keep_layouts(self._found)

    def run(self, use: Use | None = None) -> None:
        """Searches for the samples by passes of its own, for a use that needs a layout if given."""
        if self._replays is not None:
            raise UnsupportedError(
                "A step is captured into a CUDA graph, and it is not known where its samples lie: "
                "no eager step had such a graph of calls, with such shapes. Run the step that is "
                "captured a few times as it is. Call `engine.prepare_capture()` then."
            )
        if self._is_inferred and use is None:
            self._forget()
            if self._infer(is_changed=True):
                return
        self.has_searched, are_scales_inexact = True, self._scales is not None
        self.is_remembered = False
        self._forget()
        if use in self._needed:
            self._search_apart(f"{describe(use)} has a cotangent, and none for some samples alone")
        if use is not None:
            self._needed.add(use)
            self.graph.forget_layouts(and_what_was_shown=False)
        try:
            if use is not None or not self._search_by_scales():
                self._search_by_zeros(use, self.graph.lasting_proof if are_scales_inexact else None)
        except NonFiniteError:
            self._forget()
            if self.graph.known is not None:
                self._recall(self.graph.known)
            if not self._found or (self._has_changed is not None and self._has_changed.read()):
                raise
            self._watched = Proof()  # what is not finite would count as a cotangent

    def _search_by_scales(self) -> bool:
        """Makes passes by scales, to be compared with the next pass, if there is a proof."""
        channel, objectives, proof = self._survey.channel, self._objectives, self.graph.proof
        if proof is None or not objectives.is_finite.all() or self.graph.wants_proof():
            return False
        try:
            self._scales, self._is_proven = Scales(channel, objectives), True
        except NonFiniteError:  # the numbers are too large
            return False
        self._watched = proof
        if objectives.per_sample > 1:
            # The next pass has several cotangents, so that a pass with one is compared instead.
            equal = torch.ones(objectives.samples, device="cpu")
            try:
                with self.watched():
                    show_uses(channel, objectives, equal, self._measure)
                self.finish()
            except UnknownLayoutError as unknown:
                self.run(unknown.use)
            else:
                self._scales, self._watched, self._heard = None, Proof(), []
                self._is_proven = False  # and remembered
        return True

    def _search_apart(self, found: str) -> None:
        """Lets this search look at each objective of a sample alone, with the numbers of the pass.

        What they contribute to a place may cancel, or may be nothing but rounding, which is other
        digits for other numbers. Raises if this search does so already.
        """
        if self._are_apart:
            raise MixedSamplesError(
                f"{found}, so that the losses are not per-sample, or it cannot be seen where the "
                "samples lie. Pass `batch_dim=None` to `Engine`."
            )
        self._are_apart = True

    def _search_by_zeros(self, wanted: Use | None, proof: Proof | None) -> None:
        """Finds the layouts of all uses, and a proof of what the layouts depend on.

        Where rounding differs from pass to pass, as in attention on a GPU, passes by scales tell
        nothing, and the ``proof`` that is known may be about the layouts. A new one looks at all
        nodes, which takes many times as long.
        """
        objectives, survey = self._objectives, self._survey
        ways = ways_to_taps(survey) if proof is None else {}
        looked_at = spots_of(survey, ways)
        uses, spots = owners_by_zeros(objectives, survey, looked_at, are_apart=self._are_apart)
        if wanted is not None and (wanted not in uses or are_none(uses[wanted])):
            name = describe(wanted)
            self._search_apart(f"{name} has a cotangent for all samples, and none for some of them")
            self._search_by_zeros(wanted, proof)
            return
        is_finite = objectives.is_finite
        found = self._found = {
            use: fitting_layouts(use, owners, is_finite) for use, owners in uses.items()
        }
        if proof is not None:
            if proof.is_about(survey, found):
                self._watched, self._is_proven = proof, True
            else:
                self._search_by_zeros(wanted, None)
        elif objectives.is_finite.all():  # else they are for this call
            fitting = {
                spot: None if are_none(own) else regular_layouts(spot.shape, own, is_finite)
                for spot, own in spots.items()
            }
            regular = narrowed(survey, ways, fitting)
            self.graph.keep_proof(Prover(survey, ways, regular, found, uses).proof())
            self.graph.keep_layouts(found)

    def _measure(self, use: Use, cotangent: Tensor) -> None:
        """Finds the layouts of a use that this pass and those by scales show together."""
        assert self._scales is not None
        owners = self._scales.owners(use, cotangent)
        if not owners:
            raise UnknownLayoutError(use)
        self._found[use] = fitting_layouts(use, owners, self._objectives.is_finite)
