"""Lookups: the block of an embedding, whose rows are zero at every token that does not occur."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autogram._blocks.block import Block
from autogram._blocks.gram import cross, gram


@dataclass(frozen=True)
class Lookup:
    """Rows of J for a table, as the places that were read and their cotangents.

    J[k, b, v, d] = sum_t [indices[b, t] = v] cotangents[k, b, t, d]
    """

    indices: Tensor
    """Rows of the table, ``(b, t)``."""
    cotangents: Tensor
    """``(k, b, t, d)``, where ``d`` runs over all further dimensions of the table."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the cotangents."""
        return self.cotangents.dtype

    def to(self, dtype: torch.dtype) -> Lookup:
        """The lookup with its cotangents in another dtype."""
        return Lookup(self.indices, self.cotangents.to(dtype))

    def rows(self, size: int) -> Tensor:
        """Explicit rows for a table with ``size`` rows, of shape ``(k, b, size, d)``."""
        k, b, t, d = self.cotangents.shape
        places = self.indices + size * torch.arange(b, device=self.indices.device).unsqueeze(1)
        dense = self.cotangents.new_zeros(k, b * size, d)
        dense.index_add_(1, places.flatten(), self.cotangents.reshape(k, b * t, d))
        return dense.view(k, b, size, d)


def concatenate(lookups: Sequence[Lookup]) -> Lookup:
    """Several lookups in one table as one."""
    if len(lookups) == 1:
        return lookups[0]
    indices = torch.cat([lookup.indices for lookup in lookups], 1)
    return Lookup(indices, torch.cat([lookup.cotangents for lookup in lookups], 2))


def gram_of_lookup(lookup: Lookup, dense: Sequence[Block], limit: int) -> Tensor:
    """The Gramian of a lookup, and its cross terms with dense blocks of the same table.

    Only the rows of the table that occur take part, in the dense blocks too: for a language model
    whose embedding is tied to its output layer, a batch touches few of the tokens.

    Args:
        lookup: All lookups in the table.
        dense: Blocks of the whole table, whose own products are not part of the result.
        limit: The number of elements that one intermediate result may have.

    Returns:
        Inner products of shape ``(k, b, k, b)``.
    """
    support, places = torch.unique(lookup.indices, return_inverse=True)
    k, b, _, columns = lookup.cotangents.shape
    step = max(1, limit // max(1, k * b * len(support)))
    total = lookup.cotangents.new_zeros(k, b, k, b)
    for start in range(0, columns, step):
        stop = min(columns, start + step)
        part = Lookup(places, lookup.cotangents[..., start:stop]).rows(len(support))
        of_lookup = Block("kbvd->kbvd", (part,))
        total += gram([of_lookup], limit)
        for block in dense:
            product = cross(_restrict(block, support, start, stop), of_lookup)
            total += product + product.permute(2, 3, 0, 1)
    return total


def _restrict(block: Block, support: Tensor, start: int, stop: int) -> Block:
    """A dense block of a table, restricted to some rows and a range of columns."""
    row, column = tuple(block.parameter)
    at_rows = block.map(row, lambda x, dim: x.index_select(dim, support))
    return at_rows.map(column, lambda x, dim: x.narrow(dim, start, stop - start))
