"""The report: the calls that read parameters, the contractions of their blocks, and the costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from math import prod
from typing import Any

import torch

from autogram._blocks import Block, Columns, Devices, Lookup, Region, is_of_lookup, rows_block
from autogram._blocks.kernels.paths import find_path
from autogram._capture.backward.run import BlockSummary, Summary, UseReport
from autogram.errors import in_columns


@dataclass(frozen=True)
class ParameterReport:
    """The Gramian of one parameter.

    Attributes:
        name: The qualified name of the parameter.
        shape: The shape of the parameter.
        uses: The calls that read the parameter.
        plan: ``"rows"``, ``"factors"``, ``"lookup"``, or several of them for different regions,
            joined by ``"+"``.
        costs: The cost of each plan in multiply-adds, with reads and writes of memory converted to
            multiply-adds. In each region, the cheaper plan was taken.
        flops: Floating-point operations of the contraction.
        gradient_flops: Floating-point operations of the parameter's gradient in an ordinary
            backward pass.
        bytes: The size of the factors and of the largest intermediate result.
        share: The parameter's share of the total of ``flops``.
    """

    name: str
    shape: tuple[int, ...]
    uses: tuple[UseReport, ...]
    plan: str
    costs: dict[str, int]
    flops: int
    gradient_flops: int
    bytes: int
    share: float = 0.0


@dataclass(frozen=True, repr=False)
class Report:
    """How the last Gramian was computed. As a string, and in a notebook, it is a table.

    Attributes:
        samples: The number B of samples, or 1 if the objectives were treated as coupled.
        per_sample: The number K of objectives per sample, and of backward passes through the
            activations.
        parameters: One entry for each parameter with a use on which the losses depend.
        uncovered: For any other parameter, by name, the reason that it is not in the Gramian.
    """

    samples: int = 0
    per_sample: int = 0
    parameters: tuple[ParameterReport, ...] = ()
    uncovered: dict[str, str] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """Floating-point operations of all contractions."""
        return sum(of.flops for of in self.parameters)

    @property
    def gradient_flops(self) -> int:
        """Floating-point operations of the parameters' gradients in an ordinary backward pass."""
        return sum(of.gradient_flops for of in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """The report as nested dicts, lists, numbers and strings, ready for JSON."""
        totals = {"flops": self.flops, "gradient_flops": self.gradient_flops}
        fields: dict[str, Any] = json.loads(json.dumps({**asdict(self), **totals}))
        return fields

    def __repr__(self) -> str:
        if not self.samples:
            return "Report(no Gramian has been computed yet)"
        sizes = f"{self.samples} samples, {self.per_sample} objectives of each"
        counts = f"{len(self.parameters)} parameters, {len(self.uncovered)} uncovered"
        return f"Report({sizes}, {counts}, {_short(self.flops)}FLOP)"

    def __str__(self) -> str:
        if not self.samples:
            return _NOTHING
        return "\n".join([self._head, "", *in_columns(_table(self.parameters)), "", *self._notes])

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        if not self.samples:
            return f"<p>{_NOTHING}</p>"
        head, *lines = [[escape(word) for word in line] for line in _table(self.parameters)]
        rows = [f"<tr><th>{'</th><th>'.join(head)}</th></tr>"]
        rows += [f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in lines]
        notes = "".join([f"<p>{escape(note)}</p>" for note in self._notes])
        return f"<p>{escape(self._head)}</p><table>{''.join(rows)}</table>{notes}"

    @property
    def _head(self) -> str:
        """The differentiated objectives."""
        whole = "the whole batch as one sample" if self.samples == 1 else f"{self.samples} samples"
        return (
            f"Objectives: {self.per_sample} of {whole}, by {self.per_sample} backward pass"
            f"{'es' * (self.per_sample > 1)} through the activations, and contractions."
        )

    @property
    def _notes(self) -> list[str]:
        """Notes below the table, a sentence or two each."""
        lines = [
            "Rows, factors: the cost of either way in multiply-adds and memory traffic. The plan "
            "is the cheaper way.",
            f"Contractions: {_short(self.flops)}FLOP. An ordinary backward pass has one pass "
            f"through the activations, and {_short(self.gradient_flops)}FLOP for the gradients of "
            "these parameters.",
        ]
        uses = [use for of in self.parameters for use in of.uses]
        if any(use.rule is None for use in uses):
            lines.append("A fallback makes explicit rows with backward passes, not counted here.")
        if any(use.is_derived for use in uses):
            lines.append(
                "Derived tensors count as if their rows were formed; the cost of pulling these "
                "back is not counted."
            )
        return lines + [f"Not covered: `{name}` {why}" for name, why in self.uncovered.items()]


_NOTHING = "No Gramian has been computed yet."

# Reasons that a parameter is not in the Gramian, by whether it is trainable; `None`: left out.
_UNCOVERED = {
    True: "has no use with a gradient from the losses: its columns of J are zero.",
    False: "does not require a gradient.",
    None: "is left out of J: the engine's hook on its module is inactive.",
}


def make_report(summary: Summary) -> Report:
    """The report on one pass."""
    by_name: dict[str, list[BlockSummary]] = {name: [] for name in summary.names}
    for block in summary.blocks:
        for name, _ in block.sources:
            by_name.setdefault(name, []).append(block)
    parts = [_of_parameter(name, blocks, summary) for name, blocks in by_name.items() if blocks]
    total = sum(part.flops for part in parts) or 1
    return Report(
        summary.samples,
        summary.per_sample,
        tuple(replace(part, share=part.flops / total) for part in parts),
        {name: _UNCOVERED[summary.names[name]] for name, blocks in by_name.items() if not blocks},
    )


def _of_parameter(name: str, blocks: Sequence[BlockSummary], summary: Summary) -> ParameterReport:
    """The report on one parameter; its columns are planned again, from shapes alone."""
    first = blocks[0]
    region = next(of for source, of in first.sources if source == name)
    columns, whole = Columns(region, Devices(summary.limit).on(first.device)), region.canonical
    flops, gradient_flops, plans, costs = 0, 0, set[str](), Counter[str]()
    for of in blocks:
        block = _block(of)
        if of.use.rule is not None:
            gradient_flops += _gradient_flops(block)
        if of.use.is_derived:
            flops += _flops_of_rows(block, of.region)
            continue
        columns.add(of.region, block, of.subset)
        if isinstance(block, Lookup) and isinstance(block.on(of.region, whole), Lookup):
            plans.add("lookup")
            flops += 2 * min(block.multiplications(of.region.shape[0]))
    if any(of.use.is_derived for of in blocks):
        rows = torch.empty((summary.per_sample, summary.samples, *region.shape), device="meta")
        columns.add(region, rows_block(rows.to(first.dtype)))
    intermediate = 0
    for considered in columns.plans():
        best = considered[0]
        plans.add(best.method)
        flops += 2 * best.multiplications
        intermediate = max(intermediate, best.elements)
        for plan in considered:
            costs[plan.method] += plan.cost
    factors = sum(prod(shape) for of in blocks for shape in of.shapes)
    return ParameterReport(
        name=name,
        shape=region.shape,
        uses=tuple({of.call: of.use for of in blocks}.values()),
        plan="+".join(sorted(plans)),
        costs=dict(costs),
        flops=flops,
        gradient_flops=gradient_flops,
        bytes=(factors + intermediate) * max(of.dtype.itemsize for of in blocks),
    )


def _block(of: BlockSummary) -> Block | Lookup:
    """A block without data."""
    tensors = tuple(torch.empty(x, dtype=of.dtype, device="meta") for x in of.shapes)
    if is_of_lookup(of.equation):
        return Lookup(tensors[0].long(), tensors[1], of.equation)
    return Block(of.equation, tensors)


def _flops_of_rows(block: Block | Lookup, region: Region) -> int:
    """Floating-point operations to form the rows of a block."""
    if isinstance(block, Lookup):
        return block.cotangents.numel()
    block = block.reorder(region.order)  # indices of size one occur in no operand
    return 2 * find_path(block.equation, block.shapes).multiplications


def _gradient_flops(block: Block | Lookup) -> int:
    """Floating-point operations of the gradient in an ordinary backward pass, for one block."""
    if isinstance(block, Lookup):
        return prod(block.cotangents.shape[1:])
    return 2 * prod(n for label, n in block.sizes.items() if label != "k")


def _table(parameters: Iterable[ParameterReport]) -> list[tuple[str, ...]]:
    """The texts of the table, with a line for each parameter."""
    head = ("parameter", "shape", "calls", "samples in", "plan", "rows", "factors")
    lines: list[tuple[str, ...]] = [(*head, "FLOP", "bytes", "share")]
    lines += [
        (
            of.name,
            "x".join(map(str, of.shape)) or "()",
            _several(_call(use) for use in of.uses),
            _several(use.layout or "one sample" for use in of.uses),
            of.plan,
            *(_short(of.costs[name]) if name in of.costs else "" for name in ("rows", "factors")),
            _short(of.flops),
            _short(of.bytes),
            f"{of.share:.1%}",
        )
        for of in parameters
    ]
    return lines


def _call(use: UseReport) -> str:
    """A call's function, with notes: a fallback, a rule from outside of autogram, derived."""
    rule = use.rule or "fallback"
    notes = [] if rule.startswith("autogram.") else [rule]
    if use.is_derived:
        notes.append("derived")
    return f"{use.function} ({', '.join(notes)})" if notes else use.function


def _several(words: Iterable[str]) -> str:
    """Each distinct word, with its number of occurrences."""
    counts = Counter(words)
    return ", ".join(word if n == 1 else f"{n} x {word}" for word, n in counts.items())


def _short(number: int) -> str:
    """A number, in units that leave three digits."""
    power = min(5, (len(str(number)) - 1) // 3)
    return f"{number / 1000**power:.3g} {' kMGTP'[power].strip()}"
