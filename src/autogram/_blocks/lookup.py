"""Lookups: the block of an embedding, whose rows are zero at every token that does not occur."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from autogram._blocks.block import Block, Kept, rows_block
from autogram._blocks.kernels import Kernels
from autogram._blocks.plan import ProductKind, cross, mirrored, rows
from autogram._blocks.products import products
from autogram._blocks.region import Region


@dataclass(eq=False)
class Lookup(Kept):
    """Rows of J for a table, as the places that were read and their cotangents.

    J[k, b, v, d] = sum_t [indices[b, t] = v] cotangents[k, b, t, d]
    """

    indices: Tensor
    """Rows of the table, ``(b, t)``."""
    cotangents: Tensor
    """``(k, b, t, d)``, where ``d`` runs over all further dimensions of the table."""

    equation: ClassVar = ""
    inputs: ClassVar = "bt", "kbtd"

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.indices, self.cotangents

    tensors = operands

    def block(self, shape: tuple[int, ...]) -> Block:
        """Explicit rows for a table of some shape."""
        dense = self.rows(shape[0])
        return rows_block(dense.view(*dense.shape[:2], *shape))

    def at(self, samples: Tensor) -> Lookup:
        return Lookup(self.indices[samples], self.cotangents[:, samples])

    def within(self, start: int, stop: int) -> Lookup:
        """The lookup in a range of the table's rows, numbered from its start."""
        is_inside = (self.indices >= start) & (self.indices < stop)
        kept = torch.where(is_inside.unsqueeze(-1), self.cotangents, 0)
        return Lookup(torch.where(is_inside, self.indices - start, 0), kept)

    def multiplications(self, size: int) -> tuple[int, int]:
        """The cost of the Gramian: by all pairs of places, and by the rows of the table.

        The first way is cheaper where each sample reads few rows, as one for each category. In the
        other, only rows that are read take part; none of them counts as read twice.
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

    def weighted_sum(self, weights: Tensor, size: int) -> Tensor:
        """Sums of rows with weights ``(s, k, b)``, of shape ``(s, size, d)``: J^T w."""
        weighted = torch.einsum("skb,kbtd->sbtd", weights, self._wide.to(weights.dtype))
        total = weighted.new_zeros(len(weights), size, weighted.shape[-1])
        return total.index_add_(1, self.indices.flatten(), weighted.flatten(1, 2))

    def directional(self, direction: Tensor) -> Tensor:
        """Products of the rows with a direction ``(size, d)``, of shape ``(k, b)``: J v."""
        return torch.einsum("kbtd,btd->kb", self._wide.to(direction.dtype), direction[self.indices])

    @property
    def _wide(self) -> Tensor:
        """The cotangents in a dtype in which sums of them are exact enough."""
        return self.cotangents.to(torch.promote_types(self.cotangents.dtype, torch.float32))


Factors = tuple[Region, Block | Lookup]
"""The region of a parameter that a block covers, and the block."""


def block_of(equation: str, operands: tuple[Tensor, ...]) -> Block | Lookup:
    """The block with an equation, which is empty for a lookup."""
    return Block(equation, operands) if equation else Lookup(*operands)


def concatenate_lookups(lookups: Sequence[Lookup]) -> Lookup:
    indices = torch.cat([lookup.indices for lookup in lookups], 1)
    return Lookup(indices, torch.cat([lookup.cotangents for lookup in lookups], 2))


def products_of_lookup(
    kind: ProductKind, lookup: Lookup, size: int, dense: Sequence[Block], kernels: Kernels
) -> Tensor:
    """The Gramian of a lookup or its squared norms, and its cross terms with dense blocks.

    Only the rows of the table that the lookup reads take part, in the dense blocks too: a batch
    of a language model, whose embedding is tied to its output layer, reads few of the tokens.
    Products of the dense blocks with themselves are left out.
    """
    if kind == "norms" and not dense:
        return _norms(lookup, size, kernels)
    if kind == "norms" and len(lookup.indices) > 1:
        # One sample at a time: a sample reads few rows of the table, all samples together many.
        samples = torch.arange(len(lookup.indices), device=lookup.indices.device).split(1)
        some = ((lookup.at(sample), [block.at(sample) for block in dense]) for sample in samples)
        return torch.cat(
            [products_of_lookup(kind, x, size, blocks, kernels) for x, blocks in some], 1
        )
    by_pairs, by_rows = lookup.multiplications(size)
    places = lookup.cotangents[..., 0].numel()
    if kind == "gram" and not dense and by_pairs < by_rows and places**2 <= kernels.limit.elements:
        return _by_pairs(lookup, kernels)
    totals = []
    for own, others in _on_support(lookup, size, dense, kernels):
        totals.append(products(kind, [own], (), kernels))
        for block in others:
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
        cross(block, own, kernels)
        for own, others in _on_support(lookup, size, blocks, kernels)
        for block in others
    ]


def _by_pairs(lookup: Lookup, kernels: Kernels) -> Tensor:
    """The Gramian, ``(k, b, k, b)``: products of cotangents wherever both read one row."""
    k, b, t, _ = lookup.cotangents.shape
    of_places = rows_block(lookup.cotangents.flatten(1, 2).unsqueeze(2))
    found = products("gram", [of_places], (), kernels)  # (k, b * t, k, b * t)
    read = lookup.indices.flatten()
    # A selection and not a product, which would spread infinities to other samples.
    found = torch.where(read.view(-1, 1, 1) == read, found, 0)
    return found.view(k, b, t, k, b, t).sum((2, 5)) if t > 1 else found


def _norms(lookup: Lookup, size: int, kernels: Kernels) -> Tensor:
    """The squared norms of the rows, ``(k, b)``: each sample reads a table of its own."""
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
    for start in range(0, columns, step):
        stop = min(columns, start + step)
        part = Lookup(places, lookup.cotangents[..., start:stop]).rows(len(support))
        others = [_restrict(block, support, start, stop, kernels) for block in blocks]
        yield rows_block(part), others


def _restrict(
    block: Block | Lookup, support: Tensor, start: int, stop: int, kernels: Kernels
) -> Block:
    """A block of a table, restricted to some rows and a range of columns."""
    if isinstance(block, Lookup):
        places = torch.searchsorted(support, block.indices).clamp(max=len(support) - 1)
        occurs = (support[places] == block.indices).unsqueeze(-1)
        kept = torch.where(occurs, block.cotangents[..., start:stop], 0)
        return rows_block(Lookup(places, kept).rows(len(support)))
    row, *columns = tuple(block.parameter)
    at_rows = block.map(row, lambda x, dim: x.index_select(dim, support))
    if not columns:  # of a table with one column
        return rows_block(rows([at_rows], kernels).unsqueeze(-1))
    (column,) = columns
    return at_rows.map(column, lambda x, dim: x.narrow(dim, start, stop - start))
