"""A run: one call of an engine, with its request, its results, and facts for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from autogram._blocks import (
    Arena,
    Columns,
    Devices,
    Keep,
    Limit,
    Lookup,
    Placement,
    Region,
    Subset,
)
from autogram._capture.backward.verification import Check
from autogram._capture.backward.witness import Witness
from autogram._capture.recording import Channel
from autogram._capture.samples.call import CallLayouts
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Contribution, RuleUse, Use
from autogram.errors import NotConnectedError


@dataclass(frozen=True)
class UseReport:
    """One call that reads a parameter.

    Attributes:
        function: The torch function.
        index: The number of the call among the calls of its forward pass that read parameters.
        rule: The qualified name of the rule that gave the block, or ``None`` for explicit rows
            by vector-Jacobian products, whose cost is not known.
        layout: Where the samples are in the result, or ``None`` where the batch is one sample.
        is_derived: Whether the call reads a tensor that is derived from the parameter. Factors or
            rows are then pulled back to the parameter.
    """

    function: str
    index: int
    rule: str | None
    layout: str | None
    is_derived: bool


@dataclass(frozen=True)
class BlockSummary:
    """One block: its use, its tensor, and the shapes of the factors."""

    use: UseReport
    call: int
    """A number shared by all blocks of one call in this pass."""
    subset: Subset | None
    """The samples that the rows belong to, or ``None`` for all of them."""
    sources: tuple[tuple[str, Region], ...]
    """The parameter of the block, or the parameters that its tensor is derived from."""
    region: Region
    """The elements that the block covers."""
    equation: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: str


@dataclass
class Summary:
    """What one pass did, block by block. It holds no tensor."""

    limit: Limit
    """The engine's limit, as it is now."""
    samples: int = 0
    per_sample: int = 0
    blocks: list[BlockSummary] = field(default_factory=list)
    names: dict[str, bool | None] = field(default_factory=dict)
    """The parameters of the modules: whether they are trainable; ``None`` if they are left out."""
    elements_of_rows: int = 0
    """Number of elements of the parameters whose Gramian is computed from rows."""

    def restart(self, objectives: Objectives) -> None:
        """Forgets an earlier pass."""
        self.samples, self.per_sample = objectives.samples, objectives.per_sample
        self.blocks.clear()
        self.elements_of_rows = 0

    def add(
        self, use: Use, layout: Placement | None, subset: Subset | None, found: Contribution
    ) -> None:
        """Notes a block."""
        tracked, region, block = found
        names, factors = use.recording.names, block.operands
        cotangents = block.cotangents if isinstance(block, Lookup) else factors[0]
        place = None if layout is None else str(layout)
        of = UseReport(use.function, use.index, rule_name(use), place, tracked.region is None)
        sources = tuple((names[p], Region.of_parameter(p)) for p in tracked.sources)
        shapes, device = tuple(tuple(x.shape) for x in factors), factors[0].device.type
        fields = of, id(use), subset, sources, region, block.equation, shapes
        self.blocks.append(BlockSummary(*fields, cotangents.dtype, device))


class Sink(Protocol):
    """Takes the columns of parameters one after the other, as soon as they are complete."""

    def restart(self, objectives: Objectives) -> None:
        """Begins a pass, and forgets the columns of earlier passes."""

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Takes all columns of a parameter, once in a pass."""


@dataclass(eq=False)
class Run:
    """One call of an engine, which makes as many passes as it needs. It exists only that long."""

    channel: Channel
    devices: Devices
    survey: Survey
    objectives: Objectives
    check: Check | None
    """The verification of this call, if one is due."""
    layouts: CallLayouts | None = None
    """Where the samples are, or ``None`` where the batch is one sample."""
    form: Keep | None = None
    """Whether to keep factors or rows, or ``None`` to keep nothing."""
    arena: Arena | None = None
    """Where to put kept rows."""
    is_summed: bool = True
    """Whether to add up the Gramian."""
    sinks: Sequence[Sink] = ()
    """Receivers of the columns of each parameter."""
    summary: Summary | None = None
    """The summary to which to add each block; ``None`` if an earlier call has a summary of this
    graph."""
    must_verify: bool = False
    """Whether to raise an error if non-finite gradients prevent the verification."""
    retain_graph: bool = True
    """Whether the graph is needed after the pass."""
    is_step: bool = False
    """Whether the pass replaces the user's own backward pass."""
    others: Sequence[Tensor] = ()
    """Leaves outside of J whose gradients are also taken."""
    are_single: bool = False
    """Whether the losses came one by one, each of the whole batch."""
    is_misled: bool = False
    """Whether the batch is one sample because of a wrong guess, which later calls will not make."""
    witness: Witness | None = None
    """The reference for later products, if this call was verified."""
    unseen: list[Use] = field(default_factory=list)
    """Uses that the recorder did not see, found in the graph."""
    columns: Mapping[Tensor, Columns] = field(default_factory=dict)
    """The columns of each parameter that the losses reach, if they are kept."""
    rest: list[dict[Tensor, Tensor]] = field(default_factory=list)
    """By objective: the gradients of the ``others`` that it reaches."""
    gramian: Tensor = field(default_factory=lambda: torch.empty(0, 0, device="cpu"))
    """``(m, m)``, in the row-major order of the losses; empty if it is not added up."""

    @property
    def names(self) -> dict[Tensor, str]:
        """The parameters that have columns, or could have some, with their names."""
        return self.channel.names(self.columns, self.survey.passes, self.survey.left_out)


def refuse_unconnected() -> NoReturn:
    """Refuses losses that reach no parameter."""
    raise NotConnectedError(
        "The losses do not depend on any parameter of the engine's modules that requires a "
        "gradient. Compute them from an output of these modules, with gradients enabled. "
        "Checkpoints with `use_reentrant=True` hide their parameters: pass "
        "`use_reentrant=False`."
    )


def rule_name(use: Use) -> str | None:
    """The name of a use's rule, with its module, or ``None`` if it has none."""
    rule = use.rule if isinstance(use, RuleUse) else None
    if rule is None:
        return None
    return f"{rule.__module__}.{getattr(rule, '__qualname__', type(rule).__qualname__)}"
