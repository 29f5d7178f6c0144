"""The record: what one pass did, in numbers and words, for a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from autogram._blocks import Lookup, Region, Subset
from autogram._capture.limit import Limit
from autogram._capture.recording import Recording
from autogram._capture.samples.objectives import Objectives
from autogram._capture.tracked import Tracked
from autogram._capture.uses import Arrival, RuleUse, Use


@dataclass(frozen=True)
class Entry:
    """One block: a call, what it reads, and the shapes of the factors."""

    function: str
    call: int
    """A number of the call in this pass."""
    index: int
    """The place of the call among those of its forward pass that read parameters."""
    rule: str | None
    """The rule, as a place in the source, or ``None`` for the fallback."""
    layout: str | None
    subset: Subset | None
    """The samples that its rows belong to, or ``None`` for all of them."""
    sources: tuple[tuple[str, Region], ...]
    """The parameters that it reads, or that what it reads is derived from."""
    derived: tuple[int, tuple[int, ...]] | None
    """A number and a shape, if it reads a derived tensor whose rows are pulled back."""
    region: Region
    """Which elements it reads."""
    equation: str | None
    """How the factors are contracted, or ``None`` for places in a table and cotangents there."""
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: str


@dataclass
class Record:
    """What one pass did. It observes assemblies, and holds no tensor."""

    limit: Limit
    """That of the engine, as it is now."""
    samples: int = 0
    per_sample: int = 0
    entries: list[Entry] = field(default_factory=list)
    names: dict[str, bool] = field(default_factory=dict)
    """The parameters of the modules, and whether they are trainable."""
    has_sought: bool = False
    """Whether the samples were sought in the last call, or their places remembered."""
    _calls: dict[Use, int] = field(default_factory=dict, repr=False)
    _derived: dict[Tracked, int] = field(default_factory=dict, repr=False)

    def restart(self, objectives: Objectives) -> None:
        """Forgets an earlier pass."""
        self.samples, self.per_sample = objectives.samples, objectives.per_sample
        self.entries.clear()
        self._calls.clear()
        self._derived.clear()

    def see_block(self, arrival: Arrival) -> None:
        """Notes a block."""
        use, layout, subset, cotangent, tracked, region, block = arrival
        names = use.recording.names
        number = self._derived.setdefault(tracked, len(self._derived))
        equation, factors = (
            (None, (block.indices, block.cotangents))
            if isinstance(block, Lookup)
            else (block.equation, block.operands)
        )
        self.entries.append(
            Entry(
                use.function,
                self._calls.setdefault(use, len(self._calls)),
                use.index,
                place_of_rule(use),
                None if layout is None else str(layout),
                subset,
                tuple((names[p], Region.of_parameter(p)) for p in tracked.sources),
                (number, tracked.shape) if tracked.region is None else None,
                region,
                equation,
                tuple(tuple(x.shape) for x in factors),
                next(x.dtype for x in reversed(factors) if x.is_floating_point()),
                cotangent.device.type,
            )
        )

    def finish(self, recordings: Iterable[Recording]) -> None:
        """Notes what there was to cover."""
        for recording in recordings:
            self.names.update({name: p.requires_grad for p, name in recording.names.items()})
        self._calls.clear()
        self._derived.clear()


def place_of_rule(use: Use) -> str | None:
    """The rule of a use, as a place in the source, or ``None`` if it has none."""
    rule = use.rule if isinstance(use, RuleUse) else None
    if rule is None:
        return None
    return f"{rule.__module__}.{getattr(rule, '__qualname__', type(rule).__qualname__)}"
