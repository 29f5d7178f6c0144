"""Where samples lay in earlier calls of an engine, and when that holds again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from autogram._blocks import Folded, Partial, Placement
from autogram._capture.recording import Channel
from autogram._capture.samples.layouts import Layouts
from autogram._capture.samples.proofs.proof import Constant, Proof
from autogram._capture.samples.proofs.spots import Spot
from autogram._capture.samples.proofs.trials import Trial
from autogram._capture.samples.survey import Survey
from autogram._containers import Latest

InOrder = tuple[tuple[Placement, ...], ...]
"""The layouts that fit each use, in the order of a survey; none without a cotangent."""

Constants = tuple[tuple[Constant, Tensor], ...]
"""The constants that layouts depend on, with their values when the layouts were found."""


@dataclass
class Known:
    """The layouts that were found for one graph.

    Attributes:
        layouts: The layouts of each use.
        constants: The constants that the layouts depend on.
        silent: The spots whose cotangent was zero.
        trials: The nodes to try.
        is_doubted: Whether to search for the samples again before the layouts are used.
    """

    layouts: InOrder
    constants: Constants
    silent: tuple[Spot, ...]
    trials: tuple[Trial, ...]
    is_doubted: bool = False

    def changes(self, survey: Survey) -> list[Tensor]:
        """For each constant, whether it has other values now."""
        return [_differ(constant.value(survey), old) for constant, old in self.constants]

    def of_uses(self, survey: Survey) -> Layouts:
        """The layouts, by use."""
        return dict(zip(survey.uses, self.layouts, strict=True))


@dataclass
class Shown:
    """What the calls of one graph have shown together, where few samples reach some uses.

    A use that few samples reach fits a regular layout, and one of these samples alone, as of a
    layer that is called for them. Where no value moves samples, each call shows the same layout, by
    the samples that reach the use in this call. A regular layout that fits in each call is right
    if more than half of the samples have shown it.

    Attributes:
        constants: The constants that the layouts depend on.
        uses: For each use by number, the regular layouts that have fitted so far, and the samples.
    """

    constants: Constants
    uses: dict[int, tuple[tuple[Folded, ...], frozenset[int]]] = field(default_factory=dict)

    def is_of_others(self, constants: Constants) -> bool:
        """Whether other constants decide, as a later proof may say, or they have other values."""
        if [constant for constant, _ in constants] != [constant for constant, _ in self.constants]:
            return True
        pairs = zip(constants, self.constants, strict=True)
        return any(bool(_differ(new, old)) for (_, new), (_, old) in pairs)

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


@dataclass(frozen=True)
class Remembered:
    """What an engine remembers of graphs. It holds no tensor of a pass but constants.

    Layouts, what calls have shown of them, and reasons why samples count as mixed (refusals), are
    kept by a survey's key and the dimension of the losses. Proofs are kept by the structure of a
    graph and, where it matters, a pattern of sizes, or all sizes (`Search._proof_keys`).
    """

    channel: Channel
    layouts: Latest[tuple[bytes, int | None], Known] = field(default_factory=Latest)
    shown: Latest[tuple[bytes, int | None], Shown] = field(default_factory=Latest)
    refusals: Latest[tuple[bytes, int | None], str] = field(default_factory=Latest)
    proofs: Latest[tuple[bytes, int | None, bytes], Proof] = field(default_factory=Latest)
    unproven: Latest[tuple[bytes, int | None], None] = field(default_factory=Latest)
    """Graphs that were seen, of a structure with proofs for graphs of the same sizes."""

    def together(
        self, key: tuple[bytes, int | None], found: InOrder, constants: Constants
    ) -> InOrder | None:
        """The layouts of a graph to remember, by what a call has shown, and others before.

        ``None`` as long as that is not enough.
        """
        shown = self.shown.get(key)
        if shown is None and all(isinstance(x, Folded) for some in found for x in some):
            return found
        if shown is None or shown.is_of_others(constants):
            shown = self.shown[key] = Shown(constants)
        return shown.add(found)


def _differ(new: Tensor, old: Tensor) -> Tensor:
    """Whether two tensors differ, as a tensor on their device."""
    if new.shape != old.shape or new.device != old.device:
        return torch.ones((), dtype=torch.bool, device="cpu")
    return (new != old).any()
