"""Lookups: the block of an embedding, whose rows are zero at all tokens that do not occur."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from autogram._blocks.block import Block, Kept, parsed, rows_block
from autogram._blocks.kernels import Kernels
from autogram._blocks.plan import ProductKind, cross, mirrored
from autogram._blocks.products import products
from autogram._blocks.region import Region


@dataclass(eq=False)
class Lookup(Kept):
    """Rows of J for a table, as the read places and their cotangents.

    J[k, b, v, d] = sum_t [indices[b, t] = v] cotangents[k, b, t, d]
    """

    indices: Tensor
    """Rows of the table, ``(b, t)``."""
    cotangents: Tensor
    """``(k, b, t, d)``, where ``d`` runs over all further dimensions of the table."""
    equation: str = "bt,kbtd->kbvd"
    """The order of the table's dimensions: ``kbdv`` if it is read along the last one, and ``kbv``
    if it is a vector."""

    inputs: ClassVar = "bt", "kbtd"

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.indices, self.cotangents

    tensors = operands

    @property
    def parameter(self) -> str:
        """The indices of the table's dimensions."""
        return parsed(self.equation).parameter

    def size(self, shape: tuple[int, ...]) -> int:
        """The number of rows of a table of some shape."""
        return shape[self.parameter.index("v")]

    def on(self, region: Region, whole: Region) -> Lookup | Block:
        """The rows for a region, whose dimensions are those of the read table.

        They are a lookup in canonical order if the region is the ``whole`` parameter, and has
        at most one dimension of columns. Otherwise they are explicit.
        """
        several = "v" + "d" * (len(region.shape) - 1)  # dimensions of columns, or none
        labels = self.parameter if len(self.parameter) == len(region.shape) else several
        equation = "bt,kbtd->kb" + "".join([labels[dim] for dim in region.order])
        is_whole = region.canonical == whole and prod(region.shape) == prod(whole.shape)
        if is_whole and is_of_lookup(equation):
            return self if equation == self.equation else replace(self, equation=equation)
        return self.block(region.shape)

    def block(self, shape: tuple[int, ...]) -> Block:
        """Explicit rows for a table of some shape."""
        rows = self.rows(self.size(shape))
        if self.parameter == "dv":
            return Block("kbvd->kbdv", (rows,))
        return rows_block(rows.view(*rows.shape[:2], *shape))

    def at(self, samples: Tensor) -> Lookup:
        cotangents = self.cotangents[:, samples]
        return replace(self, indices=self.indices[samples], cotangents=cotangents)

    def narrow(self, label: str, start: int, length: int) -> Lookup:
        """The lookup in a range of the table's rows or columns, numbered from its start."""
        if label == "d":
            return replace(self, cotangents=self.cotangents.narrow(-1, start, length))
        is_inside = (self.indices >= start) & (self.indices < start + length)
        return self._where(is_inside, torch.where(is_inside, self.indices - start, 0))

    def select(self, label: str, chosen: Tensor) -> Lookup:
        """The lookup in some of the table's rows or columns, which are in ascending order."""
        if label == "d":
            return replace(self, cotangents=self.cotangents.index_select(-1, chosen))
        places = torch.searchsorted(chosen, self.indices).clamp(max=len(chosen) - 1)
        return self._where(chosen[places] == self.indices, places)

    def _where(self, is_kept: Tensor, indices: Tensor) -> Lookup:
        """The lookup with other numbers of the rows, without some of the reads."""
        cotangents = torch.where(is_kept.unsqueeze(-1), self.cotangents, 0)
        return replace(self, indices=indices, cotangents=cotangents)

    def multiplications(self, size: int) -> tuple[int, int]:
        """The cost of the Gramian: from all pairs of places, and from the rows of the table.

        The first way is cheaper if each sample reads few rows, such as one for each category. The
        other uses only rows that are read; none of them counts as read twice.
        """
        k, b, t, d = self.cotangents.shape
        return (k * b * t) ** 2 * (d + 2), (k * b) ** 2 * min(b * t, size) * d

    def rows(self, size: int) -> Tensor:
        """Explicit rows for a table with ``size`` rows, of shape ``(k, b, size, d)``."""
        k, b, t, d = self.cotangents.shape
        targets = self.indices + size * torch.arange(b, device=self.indices.device).unsqueeze(1)
        dense = self._wide.new_zeros(k, b * size, d)
        dense.index_add_(1, targets.flatten(), self._wide.reshape(k, b * t, d))
        return dense.view(k, b, size, d)

    def weighted_sum(self, weights: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Sums of rows with weights ``(s, k, b)``, of shape ``(s, *shape)``: J^T w."""
        weighted = torch.einsum("skb,kbtd->sbtd", weights, self._wide.to(weights.dtype))
        total = weighted.new_zeros(len(weights), self.size(shape), weighted.shape[-1])
        total.index_add_(1, self.indices.flatten(), weighted.flatten(1, 2))
        return total.mT if self.parameter == "dv" else total.view(-1, *shape)

    def directional(self, direction: Tensor) -> Tensor:
        """Products of the rows with a direction of the table's shape, ``(k, b)``: J v."""
        table = direction.mT if self.parameter == "dv" else direction.view(len(direction), -1)
        return torch.einsum("kbtd,btd->kb", self._wide.to(table.dtype), table[self.indices])

    @property
    def _wide(self) -> Tensor:
        """The cotangents in a dtype with enough precision for their sums."""
        return self.cotangents.to(torch.promote_types(self.cotangents.dtype, torch.float32))


Factors = tuple[Region, Block | Lookup]
"""The region of a parameter that a block covers, and the block."""


def is_of_lookup(equation: str) -> bool:
    """Whether an equation is that of a lookup."""
    return equation in ("bt,kbtd->kbvd", "bt,kbtd->kbdv", "bt,kbtd->kbv")


def block_of(equation: str, operands: tuple[Tensor, ...]) -> Block | Lookup:
    """The block with an equation."""
    if is_of_lookup(equation):
        indices, cotangents = operands
        return Lookup(indices, cotangents, equation)
    return Block(equation, operands)


def concatenate_lookups(lookups: Sequence[Lookup]) -> list[Lookup]:
    """One lookup for all reads of a table along the same dimension."""
    kinds: dict[str, list[Lookup]] = {}
    for lookup in lookups:
        kinds.setdefault(lookup.equation, []).append(lookup)
    return [_concatenated(of) if len(of) > 1 else of[0] for of in kinds.values()]


def _concatenated(lookups: Sequence[Lookup]) -> Lookup:
    indices = torch.cat([lookup.indices for lookup in lookups], 1)
    cotangents = torch.cat([lookup.cotangents for lookup in lookups], 2)
    return replace(lookups[0], indices=indices, cotangents=cotangents)


def products_of_lookup(
    kind: ProductKind,
    lookup: Lookup,
    size: int,
    others: Sequence[Block | Lookup],
    kernels: Kernels,
) -> Tensor:
    """The Gramian of a lookup or its squared norms, and its cross terms with other blocks.

    Only the rows of the table that the lookup reads are used, even in the other blocks: a batch
    of a language model, whose embedding is tied to its output layer, reads few of the tokens.
    Products of the other blocks with themselves are left out.
    """
    if kind == "norms" and not others:
        return _norms(lookup, size, kernels)
    if kind == "norms" and len(lookup.indices) > 1:
        # One sample at a time: a sample reads few rows of the table, all samples together many.
        samples = torch.arange(len(lookup.indices), device=lookup.indices.device).split(1)
        some = ((lookup.at(sample), [block.at(sample) for block in others]) for sample in samples)
        return torch.cat(
            [products_of_lookup(kind, x, size, blocks, kernels) for x, blocks in some], 1
        )
    by_pairs, by_rows = lookup.multiplications(size)
    places = lookup.cotangents[..., 0].numel()
    if kind == "gram" and not others and by_pairs < by_rows and places**2 <= kernels.limit.elements:
        return _by_pairs(lookup, kernels)
    totals = []
    for own, parts in _on_support(lookup, size, others, kernels):
        totals.append(products(kind, [own], (), kernels))
        for block in parts:
            product = cross(block, own, kernels, kind)
            totals += [product, product if kind == "norms" else mirrored(product)]
    return reduce(torch.add, totals)


def cross_products_of_lookup(
    blocks: Sequence[Block | Lookup], lookup: Lookup, size: int, kernels: Kernels
) -> list[Tensor]:
    """Parts of the inner products of some blocks of a table with a lookup, ``(k, b, k', b')``."""
    if not lookup.indices.numel():
        return []  # as for a batch of empty bags
    return [
        products("cross", [block], [own], kernels)
        for own, parts in _on_support(lookup, size, blocks, kernels)
        for block in parts
    ]


def _by_pairs(lookup: Lookup, kernels: Kernels) -> Tensor:
    """The Gramian, ``(k, b, k, b)``: products of cotangents wherever both read one row."""
    k, b, t, _ = lookup.cotangents.shape
    of_places = rows_block(lookup.cotangents.flatten(1, 2).unsqueeze(2))
    products_of_pairs = products("gram", [of_places], (), kernels)  # (k, b * t, k, b * t)
    read = lookup.indices.flatten()
    # A selection and not a product, which would spread infinities to other samples.
    products_of_pairs = torch.where(read.view(-1, 1, 1) == read, products_of_pairs, 0)
    return products_of_pairs.view(k, b, t, k, b, t).sum((2, 5)) if t > 1 else products_of_pairs


def _norms(lookup: Lookup, size: int, kernels: Kernels) -> Tensor:
    """The squared norms of the rows, ``(k, b)``: each sample reads its own table."""
    k, b, t, columns = lookup.cotangents.shape
    step = max(1, kernels.limit.elements // max(1, k * b * t))
    samples = torch.arange(b, device=lookup.indices.device).unsqueeze(1)
    read, places = kernels.distinct(lookup.indices + size * samples, b * size)
    norms = lookup._wide.new_zeros(k, b)
    for start in range(0, columns, step):
        part = lookup._wide[..., start : start + step].flatten(1, 2)
        rows = part.new_zeros(k, len(read), part.shape[2]).index_add_(1, places.flatten(), part)
        norms.index_add_(1, read // size, rows.square().sum(2))
    return norms


def _on_support(
    lookup: Lookup, size: int, blocks: Sequence[Block | Lookup], kernels: Kernels
) -> Iterator[tuple[Block, list[Block]]]:
    """A lookup and other blocks, on the rows that it reads, some columns at a time."""
    support, places = kernels.distinct(lookup.indices, size)
    k, b, _, columns = lookup.cotangents.shape
    step = max(1, kernels.limit.elements // max(1, k * b * len(support)))
    on_support, table = replace(lookup, indices=places), lookup.parameter
    for start in range(0, columns, step):
        count = min(columns, start + step) - start
        sizes = {"v": len(support), "d": count}
        shape = tuple([sizes[label] for label in table])
        rows = on_support.narrow("d", start, count).block(shape)
        yield rows, [_restrict(block, table, support, start, shape) for block in blocks]


def _restrict(
    block: Block | Lookup, table: str, support: Tensor, start: int, shape: tuple[int, ...]
) -> Block:
    """A block, in a range of the columns of a table and some of its rows: of a given shape.

    The table has the dimensions ``v`` and ``d``, or ``v`` alone, in the order of the block's.
    """
    for label, own, size in zip(table, block.parameter, shape, strict=True):
        is_row = label == "v"
        block = block.select(own, support) if is_row else block.narrow(own, start, size)
    return block.block(shape) if isinstance(block, Lookup) else block
