"""Columns: the part of J that belongs to one parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import chain, combinations
from typing import Literal

import torch
from torch import Tensor

from autogram._blocks.block import Block, parsed, reordered, rows_block
from autogram._blocks.gather import Gathering
from autogram._blocks.kernels import Kernels, Memory
from autogram._blocks.layout import Subset
from autogram._blocks.lookup import (
    Factors,
    Lookup,
    concatenate_lookups,
    cross_products_of_lookup,
    products_of_lookup,
)
from autogram._blocks.plan import (
    Plan,
    ProductKind,
    cost_of_rows,
    forms_rows,
    mirrored,
    plans,
    rows,
)
from autogram._blocks.products import directional, explicit, merge, products, weighted_sum
from autogram._blocks.region import Region, from_storage, overlap, put, take

Keep = Literal["auto", "factors", "rows"]
Room = Callable[[torch.device, int], bool]  # whether a device has room for so many elements


class Columns:
    """The columns of J for one parameter, as the sum of the blocks of its uses.

    Blocks are kept by the region of the parameter that they cover. Regions without a common element
    have no cross term; blocks of equal regions add up.
    """

    def __init__(self, parameter: Region, kernels: Kernels) -> None:
        self.parameter = parameter
        self.kernels = kernels
        self._whole = parameter.canonical
        self._blocks: dict[Region, list[Block]] = {}
        self._lookups: Sequence[Lookup] = ()
        self._partial: Gathering | None = None

    def add(self, region: Region, block: Block | Lookup, subset: Subset | None = None) -> None:
        """Adds the block of one use, whose tensor dimensions are those of ``region``.

        Blocks of subsets of the samples are merged, if possible, when a product needs them.
        """
        if 0 in region.shape:
            return  # of no element
        if isinstance(block, Lookup):
            block = block.on(region, self._whole)
        if isinstance(block, Block):
            equation = reordered(block.equation, region.order)
            operands = self.kernels.rounded(block.operands)
            if equation != block.equation or operands is not block.operands:
                block = Block(equation, operands, block.adjoint)
        if subset is not None:
            self._partial = self._partial or Gathering(self.kernels)
            self._partial.add(region.canonical, subset, block)
            return
        if not isinstance(block, Block):
            block.check()
            self._lookups = *self._lookups, block
            return
        blocks = self._blocks.setdefault(region.canonical, [])
        is_small = parsed(block.equation).is_small
        if is_small and (len(block.operands) == 1 or block.elements > self.kernels.tiny):
            # Every product would form these rows. For tiny factors, a bundle forms them together.
            block = explicit([block], self.kernels)
        if blocks and block.is_rows and blocks[-1].equation == block.equation:
            # Explicit rows are added up at once: a recurrent loop would collect one set per step.
            self.check()
            block = Block(block.equation, (blocks[-1].operands[0] + block.operands[0],))
            blocks.pop()  # last, as memory may run out before
        block.check()
        blocks.append(block)

    def check(self) -> None:
        """Raises ``ChangedTensorError`` if a tensor was changed in place since it was added."""
        partial = self._partial.kept if self._partial else ()
        for block in chain(*self._blocks.values(), self._lookups, partial):
            block.check()

    def keep(self, form: Keep, room: Room, memory: Memory | None = None) -> int:
        """Replaces factors by rows for later products; returns the counted number of elements.

        ``"auto"`` does so if the Gramian forms rows that are not larger than the factors.
        ``"rows"`` does so for larger rows, too, if reading them is faster than contracting again,
        and if there is ``room`` for them: only larger rows count. ``"factors"`` never does.
        """
        taken = 0
        self._prepare()
        for blocks in self._blocks.values():
            blocks[:] = merge(blocks, self.kernels)
            are_rows = len(blocks) == 1 and blocks[0].is_rows
            if form == "factors" or are_rows or not forms_rows(blocks, self.kernels):
                continue
            elements = blocks[0].elements_of_rows
            is_larger = elements > sum(block.elements for block in blocks)
            if is_larger and not (form == "rows" and self._may_keep(blocks, elements, room, taken)):
                continue
            blocks[:] = [explicit(blocks, self.kernels, memory)]
            taken += elements if is_larger else 0
        return taken

    def _may_keep(self, blocks: Sequence[Block], elements: int, room: Room, taken: int) -> bool:
        first = blocks[0].operands[0]
        again = sum(cost_of_rows(x.equation, x.shapes) for x in blocks)
        is_worth_it = self.kernels.are_rows_worth_memory(again / max(1, elements), first.dtype)
        return is_worth_it and room(first.device, taken + elements)

    @property
    def single(self) -> Block | None:
        """The only block, if it covers the whole parameter without gaps in its storage."""
        if self._partial:
            self._complete()
        if len(self._blocks) != 1 or self._lookups:
            return None
        ((region, blocks),) = self._blocks.items()
        if len(blocks) > 1 or not self.parameter.is_gapless:
            return None
        return blocks[0] if region is self._whole or region == self._whole else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the rows, at least float32, or ``None`` if nothing was added."""
        self._complete()
        factors = chain(*self._blocks.values(), self._lookups)
        dtypes = [x.dtype for of in factors for x in of.tensors if x.is_floating_point()]
        return self.kernels.accumulating(*dtypes) if dtypes else None

    @property
    def is_of_rows(self) -> bool:
        self._complete()
        each = [x[0].is_rows or forms_rows(x, self.kernels) for x in self._blocks.values()]
        return not self._lookups and all(each)

    def gram(self) -> Tensor | None:
        """The Gramian of these columns, ``(k, b, k, b)``, or ``None`` if nothing was added."""
        return self._products("gram")

    def plans(self) -> list[tuple[Plan, ...]]:
        """The plans that :meth:`gram` compares for each region, without those of lookups.

        Plans depend on shapes alone, so the blocks may be without data.
        """
        self._complete()
        parts = [self._spread()] if self._has_overlaps else self._blocks.values()
        return [plans("gram", merge(part, self.kernels), (), self.kernels) for part in parts]

    def square_norms(self) -> Tensor | None:
        """The squared norms of the rows, ``(k, b)``, or ``None`` if nothing was added."""
        return self._products("norms")

    def cross_gram(self, other: Columns) -> Tensor | None:
        """Inner products with the same parameter's rows of another Jacobian, ``(k, b, k', b')``.

        ``None`` if nothing was added to one of the two.
        """
        self._prepare()
        other._prepare()
        regions, others = self._regions, other._regions
        if regions and others and any(overlap(p, q) for p, q in combinations(regions | others, 2)):
            return products("cross", self._spread(), other._spread(), self.kernels)
        totals = [
            products("cross", blocks, other._blocks[region], self.kernels)
            for region, blocks in self._blocks.items()
            if region in other._blocks
        ]
        dense, of_other = (x._blocks.get(self._whole, []) for x in (self, other))
        blocks: list[Block | Lookup] = [*dense, *self._lookups]
        for lookup in other._lookups:
            size = lookup.size(self._whole.shape)
            totals += cross_products_of_lookup(blocks, lookup, size, self.kernels)
        for lookup in self._lookups:
            size = lookup.size(self._whole.shape)
            parts = cross_products_of_lookup(of_other, lookup, size, self.kernels)
            totals += [mirrored(product) for product in parts]
        return _sum(totals)

    def weighted_sum(self, weights: Tensor) -> Tensor | None:
        """J^T w for weights ``(s, k, b)``, or ``None`` if nothing was added.

        It is ``(s, *parameter)``, with the parameter's strides.
        """
        dtype = self.dtype
        if dtype is None:
            return None
        self._prepare()
        weights = weights.to(dtype)
        parts = [
            (region, weighted_sum(blocks, weights, self.kernels))
            for region, blocks in self._blocks.items()
        ]
        shape = self._whole.shape
        parts += [(self._whole, x.weighted_sum(weights, shape)) for x in self._lookups]
        return from_storage(put(parts, self.parameter), self.parameter)

    def directional(self, direction: Tensor) -> Tensor | None:
        """J v, ``(k, b)``, for a direction of the parameter's shape, or ``None`` for no columns."""
        dtype = self.dtype
        if dtype is None:
            return None
        self._prepare()
        direction = direction.to(dtype)
        parts = [
            directional(blocks, take(direction, region, self.parameter), self.kernels)
            for region, blocks in self._blocks.items()
        ]
        if self._lookups:
            whole = take(direction, self._whole, self.parameter)
            parts += [lookup.directional(whole) for lookup in self._lookups]
        return reduce(torch.add, parts)

    def rows(self, samples: Tensor | None = None) -> Tensor | None:
        """The explicit rows of some samples, or of all, ``(k, samples, *parameter)``."""
        if self.dtype is None:
            return None
        dense = (self if samples is None else self.at(samples)).dense()
        rows = from_storage(dense.flatten(0, 1), self.parameter)
        return rows.view(*dense.shape[:2], *self.parameter.shape)

    def at(self, samples: Tensor) -> Columns:
        some = Columns(self.parameter, self.kernels)
        for region, block in self.found():
            some.add(region, block.at(samples))
        return some

    def found(self) -> list[Factors]:
        """All added blocks, for all samples, with the region that each covers."""
        self._prepare()
        found: list[Factors] = [(region, x) for region, of in self._blocks.items() for x in of]
        return [*found, *[(self._whole, x) for x in self._lookups]] if self._lookups else found

    def dense(self) -> Tensor:
        """The explicit rows, ``(k, b, elements)`` in the order of the parameter's storage."""
        self._prepare()
        return rows(self._spread(), self.kernels)

    def slice(self, start: int, stop: int) -> Tensor:
        """The part of :meth:`dense` for a range of the dimension that is outermost in storage."""
        self._prepare()
        (size, *inner), count = self._whole.shape or (1,), stop - start
        if (start, stop) == (0, size) or any(region != self._whole for region in self._blocks):
            elements, step = self.dense(), self.parameter.places // size
            return elements if count == size else elements[:, :, start * step : stop * step]
        parts = [x.narrow(x.parameter[0], start, count) for x in self._blocks.get(self._whole, ())]
        lookups = [x.narrow(x.parameter[0], start, count) for x in self._lookups]
        parts += [x.block((count, *inner)) for x in lookups]
        return rows(parts, self.kernels).flatten(2)

    @classmethod
    def of(cls, parameter: Region, kernels: Kernels, found: Iterable[Factors]) -> Columns:
        """Columns from the result of :meth:`found` elsewhere, such as in another process."""
        columns = cls(parameter, kernels)
        for region, block in found:
            block.check()
            if isinstance(block, Block):
                columns._blocks.setdefault(region, []).append(block)
            else:
                columns._lookups = *columns._lookups, block
        return columns

    def narrow(self) -> Subset | None:
        """Drops samples without rows, if each use covers only some samples.

        Returns the samples of the remaining rows, or ``None`` for all in order.
        """
        if self._blocks or self._lookups or not self._partial:
            return None
        subset = self._partial.together
        self._complete(subset.samples)
        return subset

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

    def _prepare(self) -> None:
        """Checks the kept tensors, and makes blocks of all samples. Call it before a product."""
        self.check()
        self._complete()
        if len(self._lookups) > 1:
            self._lookups = concatenate_lookups(self._lookups)

    def _products(self, kind: ProductKind) -> Tensor | None:
        """The products of the rows with themselves, or ``None`` if nothing was added."""
        self._prepare()
        if self._has_overlaps:
            return products(kind, self._spread(), (), self.kernels)
        totals = [products(kind, blocks, (), self.kernels) for blocks in self._blocks.values()]
        others: list[Block | Lookup] = [*self._blocks.get(self._whole, ())]
        for lookup in self._lookups:
            size = lookup.size(self._whole.shape)
            totals.append(products_of_lookup(kind, lookup, size, others, self.kernels))
            others.append(lookup)  # its products with lookups by another dimension are included
        return _sum(totals)

    def _complete(self, samples: Sequence[int] | None = None) -> None:
        """Extends blocks of some samples to all samples, or to given ones."""
        if not self._partial:
            return
        self.check()
        blocks = list(self._partial.blocks(samples))
        lookups = self._partial.lookups(samples)
        # Changes come last: if memory runs out before, another attempt starts from the same state.
        for region, block in blocks:
            self._blocks.setdefault(region, []).append(block)
        self._lookups = *self._lookups, *lookups
        self._partial = None

    def _spread(self) -> list[Block]:
        """Rows of each region, on the whole parameter."""
        blocks = {region: list(found) for region, found in self._blocks.items()}
        for lookup in self._lookups:
            blocks.setdefault(self._whole, []).append(lookup.block(self._whole.shape))
        spread = []
        for region, found in blocks.items():
            k, b, *_ = (part := rows(found, self.kernels)).shape
            flat = put([(region, part.reshape(k * b, *region.shape))], self.parameter)
            spread.append(rows_block(flat.view(k, b, flat.shape[1])))
        return spread


def _sum(totals: Sequence[Tensor]) -> Tensor | None:
    return reduce(torch.add, totals) if totals else None
