"""Nodes of reading rows of a table."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from autogram._blocks import Layout, Lookup
from autogram.rules._nodes.registry import NodeInput, NodeRecipe, of_nodes
from autogram.rules._recipe import Formula, positions, read_rows
from autogram.rules.embedding import check_table, in_bags, read_bags, weighted_reads

_SUM, _MEAN = range(2)


@of_nodes("Embedding")
def _embedding(read: NodeInput) -> NodeRecipe:
    """The table of ``F.embedding``."""
    check_table("F.embedding", bool(read.number("scale_grad_by_freq")))
    return _rows(read, "indices", _padding(read))


@of_nodes("Index")
def _index(read: NodeInput) -> NodeRecipe | None:
    """``self[index]``, with an index or a mask in the first dimension alone."""
    first, *others = [saved.data is not None for saved in read.node._raw_saved_indices]
    if not first or any(others):
        return None
    return _rows(read, "indices") if len(read.result) >= len(read.shape) > 0 else None


@of_nodes("IndexSelect")
def _index_select(read: NodeInput) -> NodeRecipe | None:
    """Rows of a tensor. Other dimensions have no recipe."""
    return _rows(read, "index") if read.shape and read.number("dim") == 0 else None


@of_nodes("Gather")
def _gather(read: NodeInput) -> NodeRecipe | None:
    """Elements of a vector."""
    return _rows(read, "index") if len(read.shape) == len(read.result) == 1 else None


@of_nodes("EmbeddingBag")
def _embedding_bag(read: NodeInput) -> NodeRecipe | None:
    """The table of ``F.embedding_bag`` where it adds up rows."""
    check_table("F.embedding_bag", bool(read.number("scale_grad_by_freq")))
    mode = read.number("mode")
    if read.position or mode not in (_SUM, _MEAN):
        return None
    weights = read.node._raw_saved_per_sample_weights.data is not None
    formula = _of_bags(read.shape[0], _padding(read), mode == _MEAN)
    fields = ("indices", "offsets", *["per_sample_weights"][: int(weights)])
    return NodeRecipe(formula, fields)


def _padding(read: NodeInput) -> int | None:
    """The row whose reads have no gradient. Negative numbers, also saved as unsigned, mean none."""
    number = read.number("padding_idx")
    return number if 0 <= number < read.shape[0] else None


def _rows(read: NodeInput, field: str, padding: int | None = None) -> NodeRecipe:
    """The recipe of a table whose rows fill the last dimensions of the result."""
    rank = len(read.result) - len(read.shape) + 1
    return NodeRecipe(_of_rows(read.shape[0], padding, rank), (field,))


@lru_cache(maxsize=4096)
def _of_rows(size: int, padding: int | None, rank: int) -> Formula:
    return Formula(positions(rank), partial(_read, size, padding, rank), depth=rank)


def _read(
    size: int,
    padding: int | None,
    rank: int,
    layout: Layout | None,
    cotangent: Tensor,
    indices: Tensor,
) -> tuple[Lookup]:
    """The block of a table. A mask reads the rows where it holds."""
    if indices.dtype in (torch.bool, torch.uint8):
        indices = indices.nonzero().squeeze(1)
    indices = indices.view(cotangent.shape[1 : 1 + rank])  # one index may have no dimension
    return read_rows(size, padding, layout, cotangent, indices)


@lru_cache(maxsize=4096)
def _of_bags(size: int, padding: int | None, is_mean: bool) -> Formula:
    return Formula("T", partial(_read_bags, size, padding, is_mean))


def _read_bags(
    size: int,
    padding: int | None,
    is_mean: bool,
    layout: Layout | None,
    cotangent: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
) -> tuple[Lookup]:
    """The block of sums of rows."""
    has_last = len(offsets) > cotangent.shape[1]
    bags = partial(in_bags, offsets=offsets, include_last_offset=has_last)
    factors = None if weights is None else bags(weights)[0]
    reads = weighted_reads(*bags(indices), factors, padding, is_mean, cotangent.dtype)
    return read_bags(size, layout, cotangent, *reads)
