"""The summary: what one pass did, in numbers and words, for a report."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from autogram._blocks import Limit, Lookup, Placement, Region, Subset
from autogram._capture.samples.objectives import Objectives
from autogram._capture.uses import Contribution, RuleUse, Use


@dataclass(frozen=True)
class UseReport:
    """One call that reads a parameter.

    Attributes:
        function: The torch function.
        index: The number of the call among the calls of its forward pass that read parameters.
        rule: The qualified name of the rule that the block is from, or ``None`` for explicit rows
            by vector-Jacobian products, whose cost is not known.
        layout: Where the samples lie in the result, or ``None`` where the batch is one sample.
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
    """One block: its use, the tensor that it is for, and the shapes of the factors."""

    use: UseReport
    call: int
    """A number that is equal for all blocks of one call in this pass."""
    subset: Subset | None
    """The samples that the rows belong to, or ``None`` for all of them."""
    sources: tuple[tuple[str, Region], ...]
    """The parameter of the block, or the parameters that its tensor is derived from."""
    region: Region
    """The elements that the block covers."""
    equation: str
    """The equation of the factors, empty for a lookup: indices and cotangents."""
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: str


@dataclass
class Summary:
    """What one pass did, block by block. It holds no tensor."""

    limit: Limit
    """The limit of the engine, as it is now."""
    samples: int = 0
    per_sample: int = 0
    blocks: list[BlockSummary] = field(default_factory=list)
    names: dict[str, bool | None] = field(default_factory=dict)
    """The parameters of the modules: whether they are trainable, ``None`` if they are left out."""
    elements_of_rows: int = 0
    """How many elements have the parameters whose Gramian is computed from rows."""
    has_searched: bool = False
    """Whether the last call searched for the samples. If not, their layouts were remembered."""

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
        self.blocks.append(
            BlockSummary(
                UseReport(
                    use.function,
                    use.index,
                    rule_name(use),
                    None if layout is None else str(layout),
                    tracked.region is None,
                ),
                id(use),
                subset,
                tuple((names[p], Region.of_parameter(p)) for p in tracked.sources),
                region,
                block.equation,
                tuple(tuple(x.shape) for x in factors),
                cotangents.dtype,
                factors[0].device.type,
            )
        )


def rule_name(use: Use) -> str | None:
    """The name of a use's rule, with its module, or ``None`` if it has none."""
    rule = use.rule if isinstance(use, RuleUse) else None
    if rule is None:
        return None
    return f"{rule.__module__}.{getattr(rule, '__qualname__', type(rule).__qualname__)}"
