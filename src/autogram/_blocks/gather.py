"""Gathering: blocks that have rows of some samples only, made blocks of all samples.

A loop over samples calls a layer once for each sample. The blocks of such calls differ in nothing
but the sample, and sometimes in the number of positions. Side by side along ``b``, and filled up
with zeros, these blocks are the block that one call for all samples would have had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from autogram._blocks.block import Block, parsed
from autogram._blocks.kernels import Kernels
from autogram._blocks.kernels.paths import unused_labels
from autogram._blocks.layout import Routed, Subset
from autogram._blocks.lookup import Lookup
from autogram._blocks.products import explicit
from autogram._blocks.region import Region

_Part = tuple[Subset, Block]


class Gathering:
    """Blocks and lookups of one parameter that have rows of some samples only."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._lookups: list[tuple[Subset, Lookup]] = []
        self._blocks: dict[tuple[Region, Subset, str, int], Block] = {}
        """Keys: region, samples, equation, and 0 for explicit rows or else a number of its own."""

    @property
    def kept(self) -> list[Block | Lookup]:
        """All of them."""
        return [*self._blocks.values(), *[lookup for _, lookup in self._lookups]]

    @property
    def together(self) -> Subset:
        """The samples that any block has rows of."""
        subsets = [subset for _, subset, *_ in self._blocks]
        subsets += [subset for subset, _ in self._lookups]
        samples = sorted({sample for subset in subsets for sample in subset.samples})
        return Subset(tuple(samples), subsets[0].batch)

    def add(self, region: Region, subset: Subset, block: Block | Lookup) -> None:
        """Takes in a lookup, or a block of a region, as rows where these are no larger."""
        if isinstance(block, Lookup):
            block.check()
            self._lookups.append((subset, block))
            return
        if not block.is_rows and block.elements_of_rows <= block.elements:
            block = explicit([block], self._kernels)
        block = _with_samples(block, len(subset.samples))
        number = 0 if block.is_rows else len(self._blocks) + 1
        key = (region, subset, block.equation, number)
        if known := self._blocks.get(key):
            # Rows of one call and the next are added up at once, as in a recurrent loop.
            known.check()
            block = Block(block.equation, (known.operands[0] + block.operands[0],))
        block.check()
        self._blocks[key] = block

    def blocks(self, samples: Sequence[int] | None) -> Iterator[tuple[Region, list[Block]]]:
        """For each region, blocks that have rows of all samples, or of those that are given."""
        groups: dict[Region, dict[object, list[_Part]]] = {}
        for (region, subset, *_), block in self._blocks.items():
            form = block.form("b" + parsed(block.equation).positions)
            of_region = groups.setdefault(region, {})
            of_region.setdefault(form, []).append((subset, block))
        for region, kinds in groups.items():
            yield region, [self._gathered(parts, samples) for parts in kinds.values()]

    def lookups(self, samples: Sequence[int] | None) -> list[Lookup]:
        """One lookup, if there are any, that has rows of all samples, or of those given."""
        if not self._lookups:
            return []
        layout = _routed([subset for subset, _ in self._lookups], samples)
        longest = max(lookup.indices.shape[1] for _, lookup in self._lookups)
        indices = [_padded(lookup.indices, (1,), (longest,)) for _, lookup in self._lookups]
        cotangents = [_padded(lookup.cotangents, (2,), (longest,)) for _, lookup in self._lookups]
        # The calls of one sample stand one behind the other, each with the rows that it reads.
        return [
            Lookup(
                layout.split(torch.cat(indices), 0).flatten(1),
                layout.split(torch.cat(cotangents, 1), 1).flatten(2, 3),
            )
        ]

    def _gathered(self, parts: Sequence[_Part], samples: Sequence[int] | None) -> Block:
        """One block for several of one kind."""
        first = parts[0][1]
        layout = _routed([subset for subset, _ in parts], samples)
        positions = parsed(first.equation).positions
        sizes = {of: max(block.sizes[of] for _, block in parts) for of in positions}
        full = {**first.sizes, **sizes, "b": layout.batch * layout.most}
        filled = sum(prod(full[label] for label in of) for of in first.inputs)
        rows = layout.batch * prod(full[label] for label in "k" + first.parameter)
        if not first.is_rows and rows < filled:  # most of the filled operands would be zeros
            parts = [(subset, explicit([block], self._kernels)) for subset, block in parts]
            first, sizes = parts[0][1], {}  # no positions are left
        if first.is_rows and layout.most > 1:
            dim = first.inputs[0].index("b")
            added = torch.cat([block.operands[0] for _, block in parts], dim)
            total = added.new_zeros(*added.shape[:dim], layout.batch, *added.shape[dim + 1 :])
            owners = layout.samples.to(added.device)
            return Block(first.equation, (total.index_add(dim, owners, added),))
        more = next(unused_labels(first.equation)) if layout.most > 1 else ""  # a sample's calls
        operands = []
        for i, of in enumerate(first.inputs):
            dim, dims = of.index("b"), [of.index(label) for label in sizes]
            padded = [_padded(x.operands[i], dims, sizes.values()) for _, x in parts]
            arranged = layout.split(torch.cat(padded, dim), dim)
            operands.append(arranged if more else arranged.squeeze(dim + 1))
        inputs = ",".join(of.replace("b", "b" + more) for of in first.inputs)
        return Block(f"{inputs}->kb{first.parameter}", tuple(operands))


def _routed(subsets: Sequence[Subset], samples: Sequence[int] | None) -> Routed:
    """Where the rows of subsets lie, by the number of their sample among all or wanted samples."""
    samples = range(subsets[0].batch) if samples is None else samples
    numbers = {sample: number for number, sample in enumerate(samples)}
    owners = [numbers[sample] for subset in subsets for sample in subset.samples]
    return Routed(0, len(samples), torch.tensor(owners, device="cpu"))


def _with_samples(block: Block, samples: int) -> Block:
    """The block with the index of the samples on every operand."""
    pairs = list(zip(block.inputs, block.operands, strict=True))
    inputs = ",".join(of if "b" in of else "b" + of for of, _ in pairs)
    operands = tuple([x if "b" in of else x.expand(samples, *x.shape) for of, x in pairs])
    return Block(f"{inputs}->kb{block.parameter}", operands)


def _padded(tensor: Tensor, dims: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """A tensor filled up with zeros at the end of some dimensions, up to some sizes."""
    wanted = dict(zip(dims, sizes, strict=True))
    missing = [wanted.get(dim, n) - n for dim, n in enumerate(tensor.shape)]
    if not any(missing):
        return tensor
    return functional.pad(tensor, [x for n in reversed(missing) for x in (0, n)])
