"""A compiled part: what is known of the uses in its graph, for each call and each engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Source(NamedTuple):
    """A tracked tensor of a part. An input that is derived has neither region nor derivation."""

    inputs: tuple[int, ...]  # the positions of the roots that it is computed from
    region: Region | None  # of its only parameter, with the offset from its first element
    dtype: torch.dtype
    derivation: Derivation | None  # how it is computed, if it is derived in the part


class PartUse(NamedTuple):
    """A use in a part, of which any size may be symbolic, with numbers for tracked tensors."""

    function: str
    shape: tuple[Any, ...]
    reads: tuple[int, ...]
    recipes: tuple[tuple[tuple[int | None, ...], Formula, slice], ...]
    rule: Callable[..., Any] | None


class Part:
    """What was recorded of a part, which is a graph of Dynamo, when AOTAutograd traced it last.

    Attributes:
        parameters: The positions of the inputs that are parameters.
        roots: The positions of parameters and derived inputs.
        sources: The tracked tensors of its uses.
        derived_from: The positions of the inputs that derivations of these take.
        uses: In the order of the forward pass.
        guesses: The positions of roots that are used where nothing but a size has told that samples
            are.
        rows: The positions of parameters that get explicit rows, with the calls that have no rule.
        dtypes: Those in which autocast carried out uses.
        outputs: How outputs are computed that no sample is in.
        sizes: Which numbers the symbols of its sizes stand for.
        tensors: The positions of inputs that are tensors.
        backward: The graph of its backward pass, once there is one.
    """

    def __init__(self, graph: fx.GraphModule, inputs: PartInputs) -> None:
        self._graph, self._inputs = graph, inputs
        self.parameters = tuple(inputs.parameters)
        self.roots = (*self.parameters, *inputs.derived)
        self.sources: tuple[Source, ...] = ()
        self.derived_from: tuple[int, ...] = ()
        self.uses: tuple[PartUse, ...] = ()
        self.guesses: tuple[int, ...] = ()
        self.rows: dict[int, list[str]] = {}
        self.dtypes: set[torch.dtype] = set()
        self.outputs: dict[tuple[int, ...], Derivation] = {}
        self.sizes = Sizes(())
        self.tensors: tuple[int, ...] = ()
        self.backward: fx.GraphModule | None = None

    def trace(self, *args: Any) -> Sequence[Any]:
        """What AOTAutograd traces: runs the graph on its arguments, and keeps what was recorded.

        The last argument is what leads to engines.
        """
        args = args[:-1]
        outputs, tapping = record(self._graph, args, self._inputs)
        self._take(args, tapping)
        return outputs

    def _take(self, args: Sequence[Any], tapping: TracedTapping) -> None:
        """Keeps what was recorded, without a tensor of the tracing."""
        positions = {id(x): i for i, x in enumerate(args) if i in self.roots}
        self.sizes = Sizes(args)
        self.tensors = tuple(i for i, x in enumerate(args) if isinstance(x, Tensor))
        self.dtypes, self.outputs = tapping.dtypes, tapping.outputs
        self.guesses = tuple(positions[id(x)] for x in tapping.guesses)
        self.rows = {}
        for name, parameter in tapping.without_rule:
            self.rows.setdefault(positions[id(parameter)], []).append(name)
        numbers: dict[Tracked, int] = {}
        sources: list[Source] = []

        def number(tracked: Tracked) -> int:
            if tracked not in numbers:
                numbers[tracked] = len(sources)
                inputs = tuple(positions[id(p)] for p in tracked.sources)
                region, way = tracked.region, tapping.derivations.get(tracked)
                if region is not None:
                    start = Region.of_parameter(tracked.sources[0]).offset
                    region = region.shifted(-start)
                sources.append(Source(inputs, region, tracked.dtype, way))
            return numbers[tracked]

        self.uses = tuple(_part_use(use, number) for use in tapping.uses)
        self.sources = tuple(sources)
        ways = [source.derivation for source in sources if source.derivation is not None]
        self.derived_from = tuple(dict.fromkeys(i for way in ways for i in way.inputs))
        self._widen_rows()

    def _widen_rows(self) -> None:
        """Gives rows to all that is read together with what gets rows, or has unknown sizes.

        Rows through the part are of all uses of a parameter in it.
        """
        for use in self.uses:
            regions = [self.sources[i].region for i in use.reads]
            formulas = [formula for _, formula, _ in use.recipes]
            if not self.sizes.know((use.shape, regions, formulas)):
                for position in [x for i in use.reads for x in self.sources[i].inputs]:
                    self.rows.setdefault(position, []).append(use.function)
        count = -1
        while count < len(self.rows):
            count = len(self.rows)
            for use in self.uses:
                for i in filter(self.has_rows, use.reads):
                    for position in self.sources[i].inputs:
                        self.rows.setdefault(position, [use.function])

    def has_rows(self, source: int) -> bool:
        """Whether a tracked tensor is of parameters that get explicit rows."""
        return not self.rows.keys().isdisjoint(self.sources[source].inputs)


def _part_use(use: RuleUse, number: Callable[[Tracked], int]) -> PartUse:
    """A use without tensors."""
    recipes = tuple(
        (tuple(None if t is None else number(t) for t in operands), formula, saved)
        for operands, formula, saved in use.recipes
    )
    return PartUse(use.function, use.shape, tuple(map(number, use.reads)), recipes, use.rule)
