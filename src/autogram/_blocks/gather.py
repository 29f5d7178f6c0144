"""Gathering: blocks that have rows of some samples only, made blocks of all samples.

A loop over samples calls a layer once for each. The blocks of such calls differ in nothing but the
sample, and sometimes in the number of positions. Side by side along ``b``, filled up with zeros,
they are what one call for all samples would have been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from autogram._blocks.block import Block, unused_labels
from autogram._blocks.gram import explicit
from autogram._blocks.layout import Subset
from autogram._blocks.lookup import Lookup


class _Part(NamedTuple):
    """A block and the samples that its rows belong to."""

    subset: Subset
    block: Block


class Gathering:
    """Blocks of one region of a parameter that have rows of some samples only."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._rows: dict[tuple[Subset, str], int] = {}
        """The places of explicit rows among the parts."""

    @property
    def subsets(self) -> list[Subset]:
        """The samples that each block has rows of."""
        return [part.subset for part in self._parts]

    def add(self, subset: Subset, block: Block) -> Block:
        """Takes in a block, and returns what is kept of it: rows where these are no larger."""
        sizes = block.sizes
        rows = prod(sizes[label] for label in "kb" + block.parameter)
        if not block.is_rows and rows <= sum(x.numel() for x in block.operands):
            block = explicit([block])
        block = _with_samples(block, len(subset.samples))
        if block.is_rows:
            # Rows of one call and the next are added up at once, as in a recurrent loop.
            place = self._rows.setdefault((subset, block.equation), len(self._parts))
            if place < len(self._parts):
                total = self._parts[place].block.operands[0] + block.operands[0]
                block = Block(block.equation, (total,))
                self._parts[place] = _Part(subset, block)
                return block
        self._parts.append(_Part(subset, block))
        return block

    def blocks(self, samples: Sequence[int] | None = None) -> list[Block]:
        """Blocks that have rows of all samples, or of those that are given."""
        groups: dict[object, list[_Part]] = {}
        for part in self._parts:
            groups.setdefault(_kind(part.block), []).append(part)
        return [_gathered(parts, samples) for parts in groups.values()]


def gather_lookups(
    found: Sequence[tuple[Subset, Lookup]], samples: Sequence[int] | None = None
) -> Lookup:
    """One lookup that has rows of all samples, or of those that are given.

    Args:
        found: Lookups in one table, and the samples that their rows belong to.
        samples: The samples, or ``None`` for all.
    """
    arrangement = _Arrangement([subset for subset, _ in found], samples)
    longest = max(lookup.indices.shape[1] for _, lookup in found)
    indices = [_padded(lookup.indices, (1,), (longest,)) for _, lookup in found]
    cotangents = [_padded(lookup.cotangents, (2,), (longest,)) for _, lookup in found]
    return Lookup(
        arrangement.side_by_side(indices, 0).flatten(1),  # the calls of a sample, and their places
        arrangement.side_by_side(cotangents, 1).flatten(2, 3),
    )


class _Arrangement:
    """Where rows go that are side by side as they came.

    Args:
        subsets: The samples that they belong to.
        samples: The samples that are wanted, or ``None`` for all.
    """

    def __init__(self, subsets: Iterable[Subset], samples: Sequence[int] | None) -> None:
        subsets = list(subsets)
        samples = range(subsets[0].batch) if samples is None else samples
        places = {sample: place for place, sample in enumerate(samples)}
        self.samples = len(samples)
        self._came = [places[sample] for subset in subsets for sample in subset.samples]
        counts = Counter[int]()
        ranks = []
        for place in self._came:
            ranks.append(counts[place])
            counts[place] += 1
        self.most = max(counts.values())
        """How many rows the sample has that has most of them."""
        pairs = zip(self._came, ranks, strict=True)
        self._places = [place * self.most + rank for place, rank in pairs]
        self._is_in_order = self._places == list(range(self.samples * self.most))

    def added_up(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """The sum of the rows of each sample: ``dim`` has all samples, with zeros."""
        rows = torch.cat(list(tensors), dim)
        if self._is_in_order and self.most == 1:
            return rows
        shape = list(rows.shape)
        shape[dim] = self.samples
        places = torch.tensor(self._came, device=rows.device)
        return rows.new_zeros(shape).index_add(dim, places, rows)

    def side_by_side(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """The rows of each sample together: ``dim`` becomes ``(samples, most)``, with zeros."""
        rows = torch.cat(list(tensors), dim)
        if not self._is_in_order:
            shape = list(rows.shape)
            shape[dim] = self.samples * self.most
            places = torch.tensor(self._places, device=rows.device)
            rows = rows.new_zeros(shape).index_copy(dim, places, rows)
        arranged: Tensor = rows.unflatten(dim, (self.samples, self.most))
        return arranged


def _with_samples(block: Block, samples: int) -> Block:
    """The block with the index of the samples on every operand."""
    pairs = list(zip(block.inputs, block.operands, strict=True))
    inputs = ",".join(of if "b" in of else "b" + of for of, _ in pairs)
    operands = tuple([x if "b" in of else x.expand(samples, *x.shape) for of, x in pairs])
    return Block(f"{inputs}->kb{block.parameter}", operands)


def _positions(block: Block) -> str:
    """The indices that every operand has and that are summed over: their sizes may differ."""
    common = set.intersection(*(set(of) for of in block.inputs))
    return "".join(sorted(common - set("kb" + block.parameter)))


def _kind(block: Block) -> object:
    """What blocks must have in common to be put side by side."""
    differing = "b" + _positions(block)
    sizes = tuple([(of, n) for of, n in sorted(block.sizes.items()) if of not in differing])
    return block.equation, sizes, tuple([x.dtype for x in block.operands])


def _gathered(parts: Sequence[_Part], samples: Sequence[int] | None) -> Block:
    """One block for several of one kind."""
    first = parts[0].block
    arrangement = _Arrangement([part.subset for part in parts], samples)
    positions = _positions(first)
    sizes = {of: max(part.block.sizes[of] for part in parts) for of in positions}
    full = {**first.sizes, **sizes, "b": arrangement.samples * arrangement.most}
    filled = sum(prod(full[label] for label in of) for of in first.inputs)
    rows = arrangement.samples * prod(full[label] for label in "k" + first.parameter)
    if not first.is_rows and rows < filled:  # few calls have as many positions as the longest
        parts = [_Part(subset, explicit([block])) for subset, block in parts]
        first = parts[0].block
    if first.is_rows:
        rows_of_all = [part.block.operands[0] for part in parts]
        dim = first.inputs[0].index("b")
        return Block(first.equation, (arrangement.added_up(rows_of_all, dim),))
    operands = []
    more = next(unused_labels(first.equation))
    for i, of in enumerate(first.inputs):
        dims = [of.index(label) for label in positions]
        padded = [_padded(part.block.operands[i], dims, sizes.values()) for part in parts]
        operands.append(arrangement.side_by_side(padded, of.index("b")))
    if arrangement.most > 1:
        inputs = ",".join(of.replace("b", "b" + more) for of in first.inputs)
        return Block(f"{inputs}->kb{first.parameter}", tuple(operands))
    squeezed = [x.squeeze(of.index("b") + 1) for of, x in zip(first.inputs, operands, strict=True)]
    return Block(first.equation, tuple(squeezed))


def _padded(tensor: Tensor, dims: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """A tensor with zeros behind it along some dimensions, up to some sizes."""
    shape = list(tensor.shape)
    for dim, size in zip(dims, sizes, strict=True):
        shape[dim] = size
    if list(tensor.shape) == shape:
        return tensor
    padded = tensor.new_zeros(shape)
    padded[tuple(slice(n) for n in tensor.shape)] = tensor
    return padded
