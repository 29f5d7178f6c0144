"""The report: what was recorded, how it is contracted, and what that costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import torch

from autogram._blocks import Block, Columns, Devices, Lookup, Region
from autogram._blocks.kernels.contraction import find_path
from autogram._capture import BlockSummary, Summary
from autogram._capture.uses import rows_block


@dataclass(frozen=True)
class UseReport:
    """One call that reads a parameter.

    Attributes:
        function: The torch function.
        index: Which of the calls of its forward pass that read parameters it is.
        rule: The qualified name of the rule that its block is from, or ``None`` for explicit rows
            by vector-Jacobian products, whose cost is not known.
        layout: Where the samples lie in its result, or ``None`` where the batch is one sample.
        is_derived: Whether it reads a tensor that is derived from the parameter. Rows are then
            pulled back to the parameter.
    """

    function: str
    index: int
    rule: str | None
    layout: str | None
    is_derived: bool


@dataclass(frozen=True)
class ParameterReport:
    """The Gramian of one parameter.

    Attributes:
        name: Its qualified name.
        shape: Its shape.
        uses: The calls that read it.
        found: How the layouts of the samples are known: ``"probe"``, ``"remembered"``, or ``"one
            sample"``.
        plan: ``"rows"``, ``"factors"``, ``"lookup"``, or several of them for different regions.
        costs: The cost of each plan, in multiply-adds, with reads and writes of RAM converted to
            multiply-adds. In each region, the cheaper plan was taken.
        flops: Floating-point operations of the contraction.
        gradient_flops: Those of the parameter's gradient in an ordinary backward pass.
        bytes: Size of the factors and of the largest intermediate result.
        share: Part of the total of ``flops``.
    """

    name: str
    shape: tuple[int, ...]
    uses: tuple[UseReport, ...]
    found: str
    plan: str
    costs: dict[str, int]
    flops: int
    gradient_flops: int
    bytes: int
    share: float = 0.0


@dataclass(frozen=True)
class Report:
    """What the last Gramian was computed from. ``str`` of it is a table.

    Attributes:
        samples: B, or 1 where the objectives were treated as coupled.
        per_sample: K, the number of backward passes through the activations.
        parameters: One entry for each parameter with a use that the losses depend on.
        uncovered: Why any other parameter has no part in it, by name.
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
        """Those of the parameters' gradients in an ordinary backward pass."""
        return sum(of.gradient_flops for of in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """The same as nested dicts, lists, numbers and strings."""
        totals = {"flops": self.flops, "gradient_flops": self.gradient_flops}
        found: dict[str, Any] = json.loads(json.dumps({**asdict(self), **totals}))
        return found

    def __str__(self) -> str:
        if not self.samples:
            return "No Gramian has been computed yet."
        whole = "the whole batch as one sample" if self.samples == 1 else f"{self.samples} samples"
        lines = [
            f"Objectives: {self.per_sample} of {whole}, by {self.per_sample} backward pass"
            f"{'es' * (self.per_sample > 1)} through the activations, and contractions.",
            "",
            *_table(self.parameters),
            "",
            "Rows, factors: the cost of either way in multiply-adds and memory traffic. The plan "
            "is the cheaper.",
            f"Contractions: {_short(self.flops)}FLOP. An ordinary backward pass has one pass "
            f"through the activations, and {_short(self.gradient_flops)}FLOP for the gradients of "
            "these parameters.",
        ]
        uses = [use for of in self.parameters for use in of.uses]
        if any(use.rule is None for use in uses):
            lines.append("A fallback makes explicit rows by backward passes that are not counted.")
        if any(use.is_derived for use in uses):
            lines.append("What it costs to pull rows back from derived tensors is not counted.")
        lines += [f"Not covered: `{name}` {reason}" for name, reason in self.uncovered.items()]
        return "\n".join(lines)


def make_report(summary: Summary) -> Report:
    """The report on what one pass did."""
    by_name: dict[str, list[BlockSummary]] = {name: [] for name in summary.names}
    for entry in summary.blocks:
        for name, _ in entry.sources:
            by_name.setdefault(name, []).append(entry)
    parts = [_of_parameter(name, entries, summary) for name, entries in by_name.items() if entries]
    total = sum(part.flops for part in parts) or 1
    return Report(
        summary.samples,
        summary.per_sample,
        tuple(replace(part, share=part.flops / total) for part in parts),
        {
            name: "has no use with a gradient from the losses: its columns of J are zero."
            if summary.names[name]
            else "does not require a gradient."
            for name, entries in by_name.items()
            if not entries
        },
    )


def _of_parameter(name: str, entries: Sequence[BlockSummary], summary: Summary) -> ParameterReport:
    """The report on one parameter, whose columns are planned again, from shapes alone."""
    first = entries[0]
    region = next(of for source, of in first.sources if source == name)
    columns = Columns(region, Devices(summary.limit).on(first.device))
    flops, plans, costs = 0, set[str](), Counter[str]()
    for entry in entries:
        if entry.is_derived:
            flops += _flops_of_rows(entry)
            continue
        columns.add(entry.region, _block(entry), entry.subset)
        if entry.equation is None:
            plans.add("lookup")
            flops += _flops_of_lookup(entry, region)
    if any(entry.is_derived for entry in entries):
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
    factors = sum(prod(shape) for entry in entries for shape in entry.shapes)
    uses = {e.call: UseReport(e.function, e.index, e.rule, e.layout, e.is_derived) for e in entries}
    is_one = all(entry.layout is None for entry in entries)
    return ParameterReport(
        name=name,
        shape=region.shape,
        uses=tuple(uses.values()),
        found="one sample" if is_one else "probe" if summary.has_sought else "remembered",
        plan="+".join(sorted(plans)),
        costs=dict(costs),
        flops=flops,
        gradient_flops=sum(_gradient_flops(entry) for entry in entries),
        bytes=(factors + intermediate) * max(entry.dtype.itemsize for entry in entries),
    )


def _block(entry: BlockSummary) -> Block | Lookup:
    """The block of an entry, without data."""
    tensors = tuple(torch.empty(x, dtype=entry.dtype, device="meta") for x in entry.shapes)
    if entry.equation is None:
        return Lookup(tensors[0].long(), tensors[1])
    return Block(entry.equation, tensors)


def _flops_of_rows(entry: BlockSummary) -> int:
    """Floating-point operations that make rows of a block."""
    block = _block(entry)
    if isinstance(block, Lookup):
        return prod(entry.shapes[1])
    block = block.reorder(entry.region.order)  # an index of size one stands in no operand
    return 2 * find_path(block.equation, block.shapes).multiplications


def _flops_of_lookup(entry: BlockSummary, region: Region) -> int:
    """Those of the Gramian of a lookup, if no row of the table is read twice."""
    k, b, t, d = entry.shapes[1]
    return 2 * (k * b) ** 2 * min(b * t, region.shape[0]) * d


def _gradient_flops(entry: BlockSummary) -> int:
    """Those of the gradient that an ordinary backward pass makes in the place of a block."""
    if entry.rule is None:
        return 0
    block = _block(entry)
    if isinstance(block, Lookup):
        return prod(entry.shapes[1][1:])
    return 2 * prod(n for label, n in block.sizes.items() if label != "k")


def _table(parameters: Iterable[ParameterReport]) -> list[str]:
    """Lines with a column for each thing to say."""
    head = ("parameter", "shape", "calls", "samples in", "found", "plan", "rows", "factors")
    lines = [(*head, "FLOP", "bytes", "share"), *(_line(of) for of in parameters)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(word.ljust(n) for word, n in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _line(of: ParameterReport) -> tuple[str, ...]:
    """The entries of a line."""
    return (
        of.name,
        "x".join(map(str, of.shape)) or "()",
        _several(_call(use) for use in of.uses),
        _several(use.layout or "one sample" for use in of.uses),
        of.found,
        of.plan,
        *(_short(of.costs[name]) if name in of.costs else "" for name in ("rows", "factors")),
        _short(of.flops),
        _short(of.bytes),
        f"{of.share:.1%}",
    )


def _call(use: UseReport) -> str:
    """A call, with what is not usual about it."""
    notes = ["fallback"] if use.rule is None else []
    if use.rule is not None and not use.rule.startswith("autogram."):
        notes.append(use.rule)
    if use.is_derived:
        notes.append("derived")
    return f"{use.function} ({', '.join(notes)})" if notes else use.function


def _several(words: Iterable[str]) -> str:
    """Words, each once, with how often it occurs."""
    counts = Counter(words)
    return ", ".join(word if n == 1 else f"{n} x {word}" for word, n in counts.items())


def _short(number: int) -> str:
    """A number in units that leave three digits."""
    value, units = float(number), ["", "k", "M", "G", "T", "P"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
