"""Rows that products with other Jacobians read again."""

from __future__ import annotations

from torch import Tensor

from autogram._blocks import Block, Columns, Region, explicit, gains_by_rows


class Crossings:
    """What the rows of one pass keep for products with other Jacobians.

    A first product drops the rows that it forms. From the second one on, the rows of a parameter
    are kept if each further product costs less with them, and while there is room.
    """

    def __init__(self, *, can_keep: bool = False) -> None:
        self._can_keep = can_keep
        self._has_been = False
        self._rows: dict[Tensor, Columns] = {}
        self._taken = 0  # elements of all rows that are kept

    def empty(self) -> Crossings:
        """The same for copies of all factors, of which no rows were kept."""
        return Crossings(can_keep=self._can_keep)

    def end(self) -> None:
        """Notes that a product was made."""
        self._has_been = True

    def columns(self, parameter: Tensor, columns: Columns, other: Columns) -> Columns:
        """The columns of a parameter for a product with those of another pass.

        Args:
            parameter: The parameter.
            columns: Its columns.
            other: Columns of another pass, by whose form the cost is known.
        """
        if not (self._can_keep and self._has_been):
            return columns
        columns.check()  # also where rows are read instead
        if parameter in self._rows:
            return self._rows[parameter]
        own, others, kernels = _single_blocks(columns), _single_blocks(other), columns.kernels
        rows: dict[Region, Block] = {}
        taken = self._taken
        for region in own.keys() & others.keys():
            block = own[region]
            elements = block.elements_of_rows
            has_room = taken + elements <= kernels.room(block.operands[0].device)
            if has_room and gains_by_rows(block, others[region], kernels):
                rows[region] = explicit([block], kernels)
                taken += elements
        if not rows:
            return columns
        found = [(of, rows.get(of, x) if own.get(of) is x else x) for of, x in columns.found()]
        self._taken = taken
        self._rows[parameter] = kept = Columns.of(columns.parameter, kernels, found)
        return kept


def _single_blocks(columns: Columns) -> dict[Region, Block]:
    """The block of each region that has but one."""
    blocks: dict[Region, list[Block]] = {}
    for region, block in columns.found():
        if isinstance(block, Block):
            blocks.setdefault(region, []).append(block)
    return {region: of[0] for region, of in blocks.items() if len(of) == 1}
