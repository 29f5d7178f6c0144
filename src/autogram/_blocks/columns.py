"""Columns: everything that is known of J for one parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import combinations
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from autogram._blocks.block import Block
from autogram._blocks.gather import Gathering, gather_lookups
from autogram._blocks.gram import explicit, gram, merge, rows
from autogram._blocks.layout import Subset
from autogram._blocks.lookup import (
    Lookup,
    concatenate,
    cross_gram_with_lookup,
    gram_of_lookup,
    square_norms_of_lookup,
)
from autogram._blocks.plan import Plan, forms_rows, plans
from autogram._blocks.products import cross_gram, directional, square_norms, weighted_sum
from autogram._blocks.region import Region, overlap
from autogram._blocks.scratch import Memory
from autogram._blocks.storage import put, restore, store, take
from autogram._blocks.unchanged import Seen, check_unchanged

Keep = Literal["auto", "factors", "rows"]


class Columns:
    """The columns of J that belong to one parameter, as the sum of the blocks of its uses.

    Blocks are kept by the region of the parameter that they cover. Regions that share no element
    have no cross term; blocks of equal regions add up.

    Attributes:
        parameter: All elements of the parameter.
    """

    def __init__(self, parameter: Region) -> None:
        self.parameter = parameter
        self._whole = parameter.canonical
        self._is_table = parameter.order == (0, 1)
        self._blocks: dict[Region, list[Block]] = {}
        self._lookups: list[Lookup] = []
        self._gatherings: dict[Region, Gathering] = {}
        self._some_lookups: list[tuple[Subset, Lookup]] = []
        self._versions: list[Seen] = []
        self._dtypes: set[torch.dtype] = set()

    def add(self, region: Region, block: Block | Lookup, subset: Subset | None = None) -> None:
        """Adds the block of one use, whose tensor dimensions are those of ``region``.

        Args:
            region: The elements of the parameter that it is for.
            block: The block.
            subset: The samples that its rows belong to, if it has not one for each. Such blocks
                become one, where they can, when the first product needs them.
        """
        if isinstance(block, Lookup):
            if self._is_table and region.canonical == self._whole:
                if subset is None:
                    self._lookups.append(block)
                else:
                    self._some_lookups.append((subset, block))
                self._mark(block)
                return
            block = block.block(region.shape)
        assert len(block.parameter) == len(region.shape), (block.equation, region)
        block = block.reorder(region.order)
        if subset is not None:
            gathering = self._gatherings.setdefault(region.canonical, Gathering())
            self._mark(gathering.add(subset, block))
            return
        blocks = self._blocks.setdefault(region.canonical, [])
        if block.is_sum:
            block = explicit([block])  # smaller, and nothing makes it cheaper later
        if blocks and block.is_rows and blocks[-1].equation == block.equation:
            # Explicit rows are added up at once: a recurrent loop would pile up one set a step.
            self.check()
            block = Block(block.equation, (blocks.pop().operands[0] + block.operands[0],))
            blocks.append(block)
            self._mark_all()
        else:
            blocks.append(block)
            self._mark(block)

    def check(self) -> None:
        """Checks that everything that was added is as it was then.

        Raises:
            ChangedTensorError: It is not.
        """
        check_unchanged(self._versions)

    def keep(self, form: Keep, room: int, memory: Memory | None = None) -> int:
        """Prepares for several products.

        Args:
            form: ``"auto"`` replaces factors by rows where the Gramian would form them and they are
                no larger; ``"rows"`` does so where they are larger, too, as long as there is room;
                ``"factors"`` never.
            room: The number of elements that larger rows may have.
            memory: Where to put rows.

        Returns:
            How much of the room is taken.
        """
        self._prepare()
        is_other = False
        if len(self._lookups) > 1:
            self._lookups = [concatenate(self._lookups)]
            is_other = True
        taken = 0
        try:
            for blocks in self._blocks.values():
                if len(blocks) > 1:
                    blocks[:] = merge(blocks)
                    is_other = True
                if form == "factors" or (len(blocks) == 1 and blocks[0].is_rows):
                    continue
                if not forms_rows(blocks):
                    continue
                sizes = blocks[0].sizes
                elements = prod(sizes[label] for label in "kb" + blocks[0].parameter)
                is_larger = elements > sum(x.numel() for block in blocks for x in block.operands)
                if is_larger and (form == "auto" or elements > room - taken):
                    continue
                blocks[:] = [explicit(blocks, memory)]
                is_other = True
                taken += elements if is_larger else 0
        finally:
            if is_other:  # also where memory ran out half-way
                self._mark_all()
        return taken

    @property
    def single(self) -> Block | None:
        """The only block, if there is but one, of all elements of a parameter without gaps.

        What a product would bring to one dtype first is none, either.
        """
        self._complete()
        if len(self._blocks) != 1 or self._lookups or len(self._dtypes) > 1:
            return None
        ((region, blocks),) = self._blocks.items()
        if len(blocks) > 1 or not self.parameter.is_gapless:
            return None
        return blocks[0] if region is self._whole or region == self._whole else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the rows, or ``None`` if nothing was added."""
        self._complete()
        dtypes = {block.dtype for blocks in self._blocks.values() for block in blocks}
        dtypes.update(lookup.dtype for lookup in self._lookups)
        return reduce(torch.promote_types, dtypes) if dtypes else None

    def gram(self, limit: int) -> Tensor | None:
        """The Gramian of these columns, ``(k, b, k, b)``, or ``None`` if nothing was added.

        Args:
            limit: The number of elements that one intermediate result may have.
        """
        self._prepare()
        if self._has_overlaps:
            return gram(self._spread(), limit)
        totals = [gram(blocks, limit) for blocks in self._blocks.values()]
        if self._lookups:
            dense = self._blocks.get(self._whole, [])
            totals.append(gram_of_lookup(concatenate(self._lookups), dense, limit))
        return reduce(torch.add, totals) if totals else None

    def plans(self, device: str, limit: int) -> list[tuple[Plan, ...]]:
        """What :meth:`gram` would consider for each region on a device, lookups left out.

        It looks at shapes alone, so that the blocks may be without data.
        """
        self._prepare()
        if self._has_overlaps:
            return [plans(merge(self._spread()), device, limit)]
        return [plans(merge(blocks), device, limit) for blocks in self._blocks.values()]

    def square_norms(self, limit: int) -> Tensor | None:
        """The squared norms of the rows, ``(k, b)``, or ``None`` if nothing was added."""
        self._prepare()
        if self._has_overlaps:
            return square_norms(self._spread(), limit)
        totals = [square_norms(blocks, limit) for blocks in self._blocks.values()]
        if self._lookups:
            dense = self._blocks.get(self._whole, [])
            totals.append(square_norms_of_lookup(concatenate(self._lookups), dense, limit))
        return reduce(torch.add, totals) if totals else None

    def cross_gram(self, other: Columns, limit: int) -> Tensor | None:
        """Inner products with the rows of another Jacobian, ``(k, b, k', b')``.

        Args:
            other: The columns of the same parameter.
            limit: The number of elements that one intermediate result may have.

        Returns:
            The products, or ``None`` if nothing was added to one of the two.
        """
        dtypes = [dtype for dtype in (self.dtype, other.dtype) if dtype is not None]
        if len(dtypes) < 2:
            return None
        dtype = torch.promote_types(*dtypes)
        first, second = self._to(dtype), other._to(dtype)
        regions = {*first._regions, *second._regions}
        if any(overlap(p, q) for p, q in combinations(regions, 2)):
            return cross_gram(first._spread(), second._spread(), limit)
        totals: list[Tensor | None] = [
            cross_gram(blocks, second._blocks[region], limit)
            for region, blocks in first._blocks.items()
            if region in second._blocks
        ]
        mine, others = first._of_table, second._of_table
        totals += [cross_gram_with_lookup(mine, lookup, limit) for lookup in second._lookups]
        for lookup in first._lookups:
            dense = [block for block in others if isinstance(block, Block)]
            product = cross_gram_with_lookup(dense, lookup, limit)
            totals.append(None if product is None else product.permute(2, 3, 0, 1))
        found = [total for total in totals if total is not None]
        return reduce(torch.add, found) if found else None

    def weighted_sum(self, weights: Tensor, limit: int) -> Tensor | None:
        """J^T w for this parameter.

        Args:
            weights: ``(k, b)``, or several of them, ``(s, k, b)``.
            limit: The number of elements that one intermediate result may have.

        Returns:
            ``(*parameter)`` with the parameter's strides, or ``(s, *parameter)``; or ``None`` if
            nothing was added.
        """
        dtype = self.dtype
        if dtype is None:
            return None
        self._prepare()
        stack = weights.to(dtype).view(-1, *weights.shape[-2:])
        parts = [
            (region, weighted_sum(blocks, stack, limit)) for region, blocks in self._blocks.items()
        ]
        parts += [
            (self._whole, lookup.weighted_sum(stack, self._whole.shape[0]))
            for lookup in self._lookups
        ]
        found = restore(put(parts, self.parameter), self.parameter)
        return found if weights.dim() == 3 else found[0]

    def directional(self, direction: Tensor, limit: int) -> Tensor | None:
        """J v for this parameter, ``(k, b)``, or ``None`` if nothing was added.

        Args:
            direction: Of the parameter's shape.
            limit: The number of elements that one intermediate result may have.
        """
        dtype = self.dtype
        if dtype is None:
            return None
        self._prepare()
        flat = store(direction.to(dtype), self.parameter)
        parts = [
            directional(blocks, take(flat, region, self.parameter), limit)
            for region, blocks in self._blocks.items()
        ]
        table = [take(flat, self._whole, self.parameter)] if self._lookups else []
        parts += [lookup.directional(*table) for lookup in self._lookups]
        return reduce(torch.add, parts)

    def rows(self, samples: Tensor) -> Tensor | None:
        """The explicit rows of some samples, ``(k, samples, *parameter)``."""
        if self.dtype is None:
            return None
        dense = self._map(lambda block: block.at(samples)).dense()
        found = restore(dense.flatten(0, 1), self.parameter)
        return found.view(*dense.shape[:2], *self.parameter.shape)

    @property
    def _all(self) -> Iterator[Block | Lookup]:
        """All blocks."""
        for blocks in self._blocks.values():
            yield from blocks
        yield from self._lookups

    @property
    def _of_table(self) -> list[Block | Lookup]:
        """All blocks of the whole parameter."""
        return [*self._blocks.get(self._whole, []), *self._lookups]

    @property
    def _regions(self) -> set[Region]:
        """The regions that have blocks."""
        return {*self._blocks, self._whole} if self._lookups else set(self._blocks)

    @property
    def _has_overlaps(self) -> bool:
        """Whether some regions overlap without being equal."""
        if len(self._blocks) + len(self._lookups) < 2:
            return False
        return any(overlap(p, q) for p, q in combinations(self._regions, 2))

    def _to(self, dtype: torch.dtype) -> Columns:
        """The columns in another dtype."""
        return self._map(lambda block: block.to(dtype))

    def _map(self, function: Callable[[Any], Any]) -> Columns:
        """The columns with a function of each block."""
        mapped = Columns(self.parameter)
        mapped._blocks = {
            region: [function(block) for block in blocks] for region, blocks in self._blocks.items()
        }
        mapped._lookups = [function(lookup) for lookup in self._lookups]
        mapped._mark_all()
        return mapped

    def _prepare(self) -> None:
        """Before every product: checks what is kept, and promotes all blocks to one dtype.

        A network may read a parameter in several dtypes.
        """
        self.check()
        self._complete()
        if len(self._dtypes) > 1:
            dtype = self.dtype
            assert dtype is not None
            converted = self._to(dtype)
            self._blocks, self._lookups = converted._blocks, converted._lookups
            self._mark_all()

    def narrow(self) -> Subset | None:
        """Leaves out the samples that have no rows here, as far as uses were of some alone.

        Returns:
            The samples that the rows belong to from now on, or ``None`` for all of them in order.
        """
        if self._blocks or self._lookups:
            return None
        subsets = [x for gathering in self._gatherings.values() for x in gathering.subsets]
        subsets += [subset for subset, _ in self._some_lookups]
        if not subsets:
            return None
        samples = sorted({sample for subset in subsets for sample in subset.samples})
        self._complete(samples)
        return Subset(tuple(samples), subsets[0].batch)

    def _complete(self, samples: Sequence[int] | None = None) -> None:
        """Makes blocks of some samples blocks of all, or of those that are given."""
        if not self._gatherings and not self._some_lookups:
            return
        self.check()
        gatherings, self._gatherings = self._gatherings, {}
        for region, gathering in gatherings.items():
            self._blocks.setdefault(region, []).extend(gathering.blocks(samples))
        if self._some_lookups:
            self._lookups.append(gather_lookups(self._some_lookups, samples))
            self._some_lookups = []
        self._mark_all()

    def _mark(self, block: Block | Lookup) -> None:
        """Remembers the dtypes and versions of a block, which changes in place raise."""
        for tensor in block.tensors:
            self._versions.append((tensor, tensor._version))
            if tensor.is_floating_point():
                self._dtypes.add(tensor.dtype)

    def _mark_all(self) -> None:
        """Remembers how the tensors are that are kept now."""
        self._versions.clear()
        self._dtypes.clear()
        for block in self._all:
            self._mark(block)

    def dense(self) -> Tensor:
        """The explicit rows, ``(k, b, elements)`` in the order of the parameter's storage."""
        self._prepare()
        return rows(self._spread())

    def _spread(self) -> list[Block]:
        """Rows on the whole parameter, where regions overlap without being equal."""
        blocks = {region: list(found) for region, found in self._blocks.items()}
        for lookup in self._lookups:
            dense = lookup.block(self._whole.shape)
            blocks.setdefault(self._whole, []).append(dense)
        spread = []
        for region, found in blocks.items():
            k, b, *_ = (part := rows(found)).shape
            flat = put([(region, part.reshape(k * b, *region.shape))], self.parameter)
            spread.append(Block("kbx->kbx", (flat.view(k, b, flat.shape[1]),)))
        return spread
