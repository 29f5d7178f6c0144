"""A compiled part: facts about the uses in its graph, for each call and each engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autogram._blocks import Region
from autogram._capture.tracked import Tracked
from autogram._capture.uses import RuleUse
from autogram._compiled.tracing.derivation import Derivation
from autogram._compiled.tracing.recording import PartInputs, TracedTapping, record
from autogram._compiled.tracing.sizes import Sizes
from autogram.rules import Formula


@dataclass(eq=False)
class Source:
    """A tracked tensor of a part. A derived input has neither region nor derivation."""

    inputs: tuple[int, ...]  # positions of the roots that it is computed from
    region: Region | None  # of its only parameter, with the offset from its first element
    dtype: torch.dtype
    derivation: Derivation | None  # how to compute it, if it is derived in the part


class PartUse(NamedTuple):
    """A use in a part. Any of its sizes may be symbolic."""

    function: str
    shape: tuple[Any, ...]
    reads: tuple[Source, ...]
    recipes: tuple[tuple[tuple[Source | None, ...], Formula, slice], ...]
    rule: Callable[..., Any] | None


@dataclass(eq=False)
class Part:
    """Records of a part, which is a graph of Dynamo, from its last tracing by AOTAutograd."""

    graph: fx.GraphModule
    inputs: PartInputs
    uses: tuple[PartUse, ...] = ()  # in the order of the forward pass
    sources: tuple[Source, ...] = ()  # the tracked tensors of the uses
    derived_from: tuple[int, ...] = ()  # positions of inputs that the sources' derivations take
    guesses: tuple[int, ...] = ()
    """Positions of roots whose uses assume samples because of a size alone."""
    rows: dict[int, list[str]] = field(default_factory=dict)
    """Positions of roots that get explicit rows, with the calls that have no rule."""
    outputs: dict[tuple[int, ...], Derivation] = field(default_factory=dict)
    """How to compute outputs that contain no samples."""
    sizes: Sizes = field(default_factory=lambda: Sizes(()))
    """Values of the symbols in its sizes."""
    tensors: tuple[int, ...] = ()  # positions of inputs that are tensors
    backward: fx.GraphModule | None = None  # the graph of its backward pass, once there is one

    def __post_init__(self) -> None:
        self.parameters = tuple(self.inputs.parameters)  # positions of inputs
        self.roots = (*self.parameters, *self.inputs.derived)

    def trace(self, *args: Any) -> Sequence[Any]:
        """AOTAutograd traces this: it runs the graph on its arguments, and keeps the record.

        The last argument leads to engines.
        """
        args = args[:-1]
        outputs, tapping = record(self.graph, args, self.inputs)
        self._take(args, tapping)
        return outputs

    def _take(self, args: Sequence[Any], tapping: TracedTapping) -> None:
        """Keeps the record, without tensors of the tracing."""
        positions = {id(x): i for i, x in enumerate(args) if i in self.roots}
        self.sizes = Sizes(args)
        self.tensors = tuple(i for i, x in enumerate(args) if isinstance(x, Tensor))
        self.outputs = tapping.outputs
        self.guesses = tuple(positions[id(x)] for x in tapping.guesses)
        self.rows = {}
        for name, parameter in tapping.without_rule:
            self.rows.setdefault(positions[id(parameter)], []).append(name)
        sources: dict[Tracked, Source] = {}

        def source_of(tracked: Tracked) -> Source:
            if tracked not in sources:
                inputs = tuple(positions[id(p)] for p in tracked.sources)
                region, way = tracked.region, tapping.derivations.get(tracked)
                if region is not None:
                    start = Region.of_parameter(tracked.sources[0]).offset
                    region = region.shifted(-start)
                sources[tracked] = Source(inputs, region, tracked.dtype, way)
            return sources[tracked]

        self.uses = tuple(_part_use(use, source_of) for use in tapping.uses)
        self.sources = tuple(sources.values())
        ways = [source.derivation for source in self.sources if source.derivation is not None]
        self.derived_from = tuple(dict.fromkeys(i for way in ways for i in way.inputs))
        self._widen_rows()

    def _widen_rows(self) -> None:
        """Also gives rows to roots that are read together with those, or with unknown sizes.

        Rows through the part cover all uses of a parameter in it.
        """
        for use in self.uses:
            regions = [source.region for source in use.reads]
            formulas = [formula for _, formula, _ in use.recipes]
            if not self.sizes.know((use.shape, regions, formulas)):
                for position in [x for source in use.reads for x in source.inputs]:
                    self.rows.setdefault(position, []).append(use.function)
        count = -1
        while count < len(self.rows):
            count = len(self.rows)
            for use in self.uses:
                for source in filter(self.has_rows, use.reads):
                    for position in source.inputs:
                        self.rows.setdefault(position, [use.function])

    def has_rows(self, source: Source) -> bool:
        """Whether a tracked tensor comes from parameters that get explicit rows."""
        return not self.rows.keys().isdisjoint(source.inputs)


def _part_use(use: RuleUse, source_of: Callable[[Tracked], Source]) -> PartUse:
    """A copy of a use without tensors."""
    recipes = tuple(
        (tuple(None if t is None else source_of(t) for t in operands), formula, saved)
        for operands, formula, saved in use.recipes
    )
    return PartUse(use.function, use.shape, tuple(map(source_of, use.reads)), recipes, use.rule)
