"""Rows that are kept for products with other Jacobians."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autogram._blocks import Block, Columns, Region, explicit, gains_by_rows


class Crossings:
    """The rows of one pass that are kept for products with other Jacobians.

    A first product drops its rows. From the second on, the rows of a parameter
    are kept if they make each further product cheaper, and if there is memory for them.
    """

    def __init__(self, *, can_keep: bool = False) -> None:
        self.can_keep = can_keep
        self.is_due = False  # whether a product was made: more may follow
        self.rows: dict[Tensor, Columns] = {}
        self.taken = 0  # elements of all kept rows

    def empty(self) -> Crossings:
        """The same without rows, for copies of all factors."""
        return Crossings(can_keep=self.can_keep)


def for_crossing(
    parameter: Tensor, passes: Sequence[tuple[Crossings, Columns]], other: Columns
) -> list[Columns]:
    """The columns of a parameter in some passes, for a product with those of another pass.

    Either all of them keep rows, or none does: rows beside factors would take two products.

    Args:
        parameter: The parameter.
        passes: The kept rows and the columns of each pass.
        other: Columns of another pass, whose form determines the cost.
    """
    factors = [columns for _, columns in passes]
    if not all(crossings.can_keep and crossings.is_due for crossings, _ in passes):
        return factors
    if not all(parameter in crossings.rows for crossings, _ in passes):
        others = _single_blocks(other)
        gains = [_gains(columns, others) for columns in factors]
        if not all(gains):
            return factors
        sizes = [sum(block.elements_of_rows for block in blocks.values()) for blocks in gains]
        taken = sum(sizes) + sum(crossings.taken for crossings, _ in passes)
        device = next(iter(gains[0].values())).operands[0].device
        if taken > factors[0].kernels.room(device):
            return factors
        for (crossings, columns), blocks, size in zip(passes, gains, sizes, strict=True):
            crossings.rows[parameter] = _with_rows(columns, blocks)
            crossings.taken += size
    for columns in factors:
        columns.check()  # even if rows are read instead
    return [crossings.rows[parameter] for crossings, _ in passes]


def _gains(columns: Columns, others: dict[Region, Block]) -> dict[Region, Block]:
    """Blocks whose products with others cost less once their rows are there."""
    return {
        region: block
        for region, block in _single_blocks(columns).items()
        if region in others and gains_by_rows(block, others[region], columns.kernels)
    }


def _with_rows(columns: Columns, blocks: dict[Region, Block]) -> Columns:
    """Columns with some blocks replaced by their rows."""
    kernels = columns.kernels
    rows = {region: explicit([block], kernels) for region, block in blocks.items()}
    kept = [
        (region, rows[region] if blocks.get(region) is factors else factors)
        for region, factors in columns.found()
    ]
    return Columns.of(columns.parameter, kernels, kept)


def _single_blocks(columns: Columns) -> dict[Region, Block]:
    """The block of each region that has but one."""
    blocks: dict[Region, list[Block]] = {}
    for region, block in columns.found():
        if isinstance(block, Block):
            blocks.setdefault(region, []).append(block)
    return {region: each[0] for region, each in blocks.items() if len(each) == 1}
