"""Columns: everything that is known of J for one parameter."""

from __future__ import annotations

from functools import lru_cache, reduce
from itertools import combinations

import torch
from torch import Tensor

from autogram._blocks.block import Block
from autogram._blocks.gram import gram, rows
from autogram._blocks.lookup import Lookup, concatenate, gram_of_lookup
from autogram._blocks.region import Region, overlap


class Columns:
    """The columns of J that belong to one parameter, as the sum of the blocks of its uses.

    Blocks are kept by the region of the parameter that they cover. Regions that share no element
    have no cross term; blocks of equal regions add up.
    """

    def __init__(self, parameter: Region) -> None:
        self._whole = parameter.canonical
        self._is_table = parameter.order == (0, 1)
        self._blocks: dict[Region, list[Block]] = {}
        self._lookups: list[Lookup] = []

    def add(self, region: Region, block: Block | Lookup) -> None:
        """Adds the block of one use, whose tensor dimensions are those of ``region``."""
        if isinstance(block, Lookup):
            if self._is_table and region.canonical == self._whole:
                self._lookups.append(block)
                return
            block = block_of_lookup(block, region.shape)
        blocks = self._blocks.setdefault(region.canonical, [])
        block = _canonical(block, region)
        if blocks and block.is_rows and blocks[-1].equation == block.equation:
            # Explicit rows are added up at once: a recurrent loop would pile up one set a step.
            block = Block(block.equation, (blocks.pop().operands[0] + block.operands[0],))
        blocks.append(block)

    def gram(self, limit: int) -> Tensor | None:
        """The Gramian of these columns, ``(k, b, k, b)``, or ``None`` if nothing was added.

        Args:
            limit: The number of elements that one intermediate result may have.
        """
        self._unify()
        regions = {*self._blocks, self._whole} if self._lookups else self._blocks.keys()
        if any(overlap(p, q) for p, q in combinations(regions, 2)):
            return gram(self._spread(), limit)
        totals = [gram(blocks, limit) for blocks in self._blocks.values()]
        if self._lookups:
            dense = self._blocks.get(self._whole, [])
            totals.append(gram_of_lookup(concatenate(self._lookups), dense, limit))
        return reduce(torch.add, totals) if totals else None

    def _unify(self) -> None:
        """Promotes all blocks to one dtype, where a network reads a parameter in several."""
        dtypes = {block.dtype for blocks in self._blocks.values() for block in blocks}
        dtypes.update(lookup.dtype for lookup in self._lookups)
        if len(dtypes) > 1:
            dtype = reduce(torch.promote_types, dtypes)
            for blocks in self._blocks.values():
                blocks[:] = [block.to(dtype) for block in blocks]
            self._lookups = [lookup.to(dtype) for lookup in self._lookups]

    def dense(self) -> Tensor:
        """The explicit rows, ``(k, b, elements)`` in the order of the parameter's storage."""
        return rows(self._spread())

    def _spread(self) -> list[Block]:
        """Rows on the whole parameter, where regions overlap without being equal."""
        blocks = dict(self._blocks)
        for lookup in self._lookups:
            shape = self._whole.shape
            dense = _canonical(block_of_lookup(lookup, shape), self._whole)
            blocks.setdefault(self._whole, []).append(dense)
        first, last = self._whole.bounds
        spread = []
        for region, found in blocks.items():
            k, b, *_ = (part := rows(found)).shape
            part = part.reshape(k, b, -1)
            if region == self._whole and part.shape[2] == last - first + 1:
                spread.append(Block("kbx->kbx", (part,)))
                continue
            whole = part.new_zeros(*part.shape[:2], last - first + 1)
            whole[..., region.indices().to(part.device) - first] = part
            spread.append(Block("kbx->kbx", (whole,)))
        return spread


def block_of_lookup(lookup: Lookup, shape: tuple[int, ...]) -> Block:
    """A lookup as explicit rows for a table of some shape."""
    labels = "vdefghij"[: len(shape)]
    dense = lookup.rows(shape[0])
    return Block(f"kb{labels}->kb{labels}", (dense.view(*dense.shape[:2], *shape),))


def _canonical(block: Block, region: Region) -> Block:
    """The block with the tensor's dimensions in canonical order.

    Dimensions that address nothing new leave the output: for an expanded one, that is the sum over
    the copies.
    """
    return Block(_canonical_equation(block.equation, region), block.operands)


@lru_cache(maxsize=4096)
def _canonical_equation(equation: str, region: Region) -> str:
    """The equation of a block with the tensor's dimensions in canonical order."""
    inputs, output = equation.split("->")
    assert len(output) - 2 == len(region.shape), (equation, region)
    labels = "".join(output[2 + dim] for dim in region.order)
    return f"{inputs}->kb{labels}"
