"""The report: what was recorded, how it is contracted, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from autogram._blocks import Block, Columns, Lookup, Region, meta
from autogram._blocks.path import find_path
from autogram._capture import BlockSummary, Summary
from autogram._capture.uses import rows_block


@dataclass(frozen=True)
class UseReport:
    """One call that reads a parameter.

    Attributes:
        function: The torch function.
        index: The place of the call among those of its forward pass that read parameters.
        rule: The rule that its block is from, as a place in the source, or ``None`` for explicit
            rows by vector-Jacobian products, whose cost is not known.
        layout: Where the samples lie in its result, or ``None`` where the batch is one sample.
        is_derived: Whether it reads a tensor that is derived from the parameter, to which rows are
            then pulled back.
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
        found: How the places of the samples are known: ``"probe"``, ``"remembered"``, or ``"one
            sample"``.
        plan: ``"rows"``, ``"factors"``, ``"lookup"``, or several of them for different regions.
        costs: Of each plan that was considered, in multiply-adds, with memory traffic counted as
            such; of each region the cheaper one was taken.
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
        found: dict[str, Any] = _plain({**asdict(self), **totals})
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


def _plain(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def make_report(summary: Summary) -> Report:
    """The report on what a pass did."""
    by_name: dict[str, list[BlockSummary]] = {name: [] for name in summary.names}
    for entry in summary.blocks:
        for name, _ in entry.sources:
            by_name.setdefault(name, []).append(entry)
    parts = [_of_parameter(name, entries, summary) for name, entries in by_name.items() if entries]
    total = sum(part.flops for part in parts)
    shared = [replace(part, share=part.flops / total if total else 0.0) for part in parts]
    return Report(
        summary.samples,
        summary.per_sample,
        tuple(shared),
        {
            name: "has no use with a gradient from the losses: its columns of J are zero."
            if summary.names[name]
            else "does not require a gradient."
            for name, entries in by_name.items()
            if not entries
        },
    )


def _of_parameter(name: str, entries: Sequence[BlockSummary], summary: Summary) -> ParameterReport:
    """The report on one parameter."""
    region = next(of for entry in entries for source, of in entry.sources if source == name)
    itemsize = max(entry.dtype.itemsize for entry in entries)
    columns = Columns(region)
    flops, intermediate = 0, 0
    names, costs = set[str](), dict[str, int]()
    for entry in entries:
        if not entry.is_derived:
            columns.add(entry.region, _block(entry), entry.subset)
        else:
            flops += _flops_of_rows(entry)
    if any(entry.is_derived for entry in entries):
        rows = meta(((summary.per_sample, summary.samples, *region.shape),))[0]
        columns.add(region, rows_block(rows.to(entries[0].dtype)))
    for considered in columns.plans(entries[0].device, summary.limit.elements):
        best = considered[0]
        names.add(best.method)
        flops += 2 * best.multiplications
        intermediate = max(intermediate, best.elements)
        for plan in considered:
            costs[plan.method] = costs.get(plan.method, 0) + plan.cost
    for entry in entries:
        if entry.equation is None and not entry.is_derived:
            names.add("lookup")
            flops += _flops_of_lookup(entry, region)
    uses = {entry.call: _use(entry) for entry in entries}
    is_one = all(entry.layout is None for entry in entries)
    return ParameterReport(
        name,
        region.shape,
        tuple(uses.values()),
        "one sample" if is_one else "probe" if summary.has_sought else "remembered",
        "+".join(sorted(names)),
        costs,
        flops,
        sum(_gradient_flops(entry) for entry in entries),
        sum(prod(shape) for entry in entries for shape in entry.shapes) * itemsize
        + intermediate * itemsize,
    )


def _use(entry: BlockSummary) -> UseReport:
    """The call of an entry."""
    return UseReport(entry.function, entry.index, entry.rule, entry.layout, entry.is_derived)


def _block(entry: BlockSummary) -> Block | Lookup:
    """The block of an entry, without data."""
    tensors = tuple(x.to(entry.dtype) for x in meta(entry.shapes))
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
