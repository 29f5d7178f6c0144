"""Accounting: from the shapes that a pass has left behind to what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autogram._blocks import Block, Columns, Lookup, Region, meta
from autogram._blocks.path import find_path
from autogram._capture import Entry, Record
from autogram._capture.use import rows_block
from autogram._report import ParameterReport, Report, UseReport


def make_report(record: Record) -> Report:
    """The report on what a record has seen."""
    by_name: dict[str, list[Entry]] = {name: [] for name in record.names}
    for entry in record.entries:
        for name, _ in entry.sources:
            by_name.setdefault(name, []).append(entry)
    parts = [_of_parameter(name, entries, record) for name, entries in by_name.items() if entries]
    total = sum(part.flops for part in parts)
    shared = [replace(part, share=part.flops / total if total else 0.0) for part in parts]
    return Report(
        record.samples,
        record.per_sample,
        tuple(shared),
        {
            name: "has no use with a gradient from the losses: its columns of J are zero."
            if record.names[name]
            else "does not require a gradient."
            for name, entries in by_name.items()
            if not entries
        },
    )


def _of_parameter(name: str, entries: Sequence[Entry], record: Record) -> ParameterReport:
    """The report on one parameter."""
    region = next(of for entry in entries for source, of in entry.sources if source == name)
    itemsize = max(entry.dtype.itemsize for entry in entries)
    columns = Columns(region)
    flops, intermediate = 0, 0
    names, costs = set[str](), dict[str, int]()
    for entry in entries:
        if entry.derived is None:
            columns.add(entry.region, _block(entry), entry.subset)
        else:
            flops += _flops_of_rows(entry)
    if any(entry.derived for entry in entries):
        rows = meta(((record.per_sample, record.samples, *region.shape),))[0]
        columns.add(region, rows_block(rows.to(entries[0].dtype)))
    for considered in columns.plans(entries[0].device, record.limit.elements):
        best = considered[0]
        names.add(best.method)
        flops += 2 * best.multiplications
        intermediate = max(intermediate, best.elements)
        for plan in considered:
            costs[plan.method] = costs.get(plan.method, 0) + plan.cost
    for entry in entries:
        if entry.equation is None and entry.derived is None:
            names.add("lookup")
            flops += _flops_of_lookup(entry, region)
    uses = {entry.call: _use(entry) for entry in entries}
    is_one = all(entry.layout is None for entry in entries)
    return ParameterReport(
        name,
        region.shape,
        tuple(uses.values()),
        "one sample" if is_one else "probe" if record.has_sought else "remembered",
        "+".join(sorted(names)),
        costs,
        flops,
        sum(_gradient_flops(entry) for entry in entries),
        sum(prod(shape) for entry in entries for shape in entry.shapes) * itemsize
        + intermediate * itemsize,
    )


def _use(entry: Entry) -> UseReport:
    """The call of an entry."""
    is_derived = entry.derived is not None
    return UseReport(entry.function, entry.index, entry.rule, entry.layout, is_derived)


def _block(entry: Entry) -> Block | Lookup:
    """The block of an entry, without data."""
    tensors = tuple(x.to(entry.dtype) for x in meta(entry.shapes))
    if entry.equation is None:
        return Lookup(tensors[0].long(), tensors[1])
    return Block(entry.equation, tensors)


def _flops_of_rows(entry: Entry) -> int:
    """Floating-point operations that make rows of a block."""
    block = _block(entry)
    if isinstance(block, Lookup):
        return prod(entry.shapes[1])
    block = block.reorder(entry.region.order)  # an index of size one stands in no operand
    return 2 * find_path(block.equation, block.shapes).multiplications


def _flops_of_lookup(entry: Entry, region: Region) -> int:
    """Those of the Gramian of a lookup, if no row of the table is read twice."""
    k, b, t, d = entry.shapes[1]
    return 2 * (k * b) ** 2 * min(b * t, region.shape[0]) * d


def _gradient_flops(entry: Entry) -> int:
    """Those of the gradient that an ordinary backward pass makes in the place of a block."""
    if entry.rule is None:
        return 0
    block = _block(entry)
    if isinstance(block, Lookup):
        return prod(entry.shapes[1][1:])
    return 2 * prod(n for label, n in block.sizes.items() if label != "k")
