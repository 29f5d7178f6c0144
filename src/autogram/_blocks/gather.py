"""Gathering: extends blocks with rows of some samples to blocks of all samples.

A loop over samples calls a layer once for each sample. The blocks of such calls differ only in the
sample, and sometimes in the number of positions. Concatenated along ``b``, and padded
with zeros, they form the block that one call for all samples would have had.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
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
    """Blocks and lookups of one parameter with rows of some samples only."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._lookups: list[tuple[Subset, Lookup]] = []
        self._blocks: dict[tuple[Region, Subset, str, int], Block] = {}
        """Keys: region, samples, equation, and 0 for explicit rows, otherwise a unique number."""

    @property
    def kept(self) -> list[Block | Lookup]:
        """All of them."""
        return [*self._blocks.values(), *[lookup for _, lookup in self._lookups]]

    @property
    def together(self) -> Subset:
        """The samples with rows in any block."""
        subsets = [subset for _, subset, *_ in self._blocks]
        subsets += [subset for subset, _ in self._lookups]
        samples = sorted({sample for subset in subsets for sample in subset.samples})
        return Subset(tuple(samples), subsets[0].batch)

    def add(self, region: Region, subset: Subset, block: Block | Lookup) -> None:
        """Adds a lookup, or a block of a region, as rows if these are not larger."""
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
            # Rows of successive calls are added up at once, as in a recurrent loop.
            known.check()
            block = Block(block.equation, (known.operands[0] + block.operands[0],))
        block.check()
        self._blocks[key] = block

    def blocks(self, samples: Sequence[int] | None) -> Iterator[tuple[Region, Block]]:
        """Blocks of each region with rows of all samples, or of given ones."""
        kinds: dict[tuple[Region, Hashable], list[_Part]] = {}
        for (region, subset, *_), block in self._blocks.items():
            form = block.form("b" + parsed(block.equation).positions)
            kinds.setdefault((region, form), []).append((subset, block))
        for (region, _), parts in kinds.items():
            yield region, self._gathered(parts, samples)

    def lookups(self, samples: Sequence[int] | None) -> list[Lookup]:
        """Lookups with rows of all samples, or of given ones: one for each equation."""
        kinds: dict[str, list[tuple[Subset, Lookup]]] = {}
        for subset, lookup in self._lookups:
            kinds.setdefault(lookup.equation, []).append((subset, lookup))
        return [_gathered_lookup(parts, samples) for parts in kinds.values()]

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
        for of, *each in zip(first.inputs, *[block.operands for _, block in parts], strict=True):
            arranged = _arranged(each, of, sizes, layout)
            operands.append(arranged if more else arranged.squeeze(of.index("b") + 1))
        inputs = ",".join(of.replace("b", "b" + more) for of in first.inputs)
        return Block(f"{inputs}->kb{first.parameter}", tuple(operands))


def _routed(subsets: Sequence[Subset], samples: Sequence[int] | None) -> Routed:
    """The places of the rows of subsets among all samples, or among wanted ones."""
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


def _gathered_lookup(
    parts: Sequence[tuple[Subset, Lookup]], samples: Sequence[int] | None
) -> Lookup:
    """One lookup for several with one equation."""
    layout = _routed([subset for subset, _ in parts], samples)
    sizes = {"t": max(lookup.indices.shape[1] for _, lookup in parts)}
    each = zip(Lookup.inputs, *[x.operands for _, x in parts], strict=True)
    indices, cotangents = [_arranged(x, of, sizes, layout) for of, *x in each]
    # The calls of one sample are concatenated, each with the rows that it reads.
    return Lookup(indices.flatten(1), cotangents.flatten(2, 3), parts[0][1].equation)


def _arranged(
    operands: Sequence[Tensor], labels: str, sizes: Mapping[str, int], layout: Routed
) -> Tensor:
    """Joins operands of several blocks, with the calls of a sample in a dimension after ``b``.

    They are padded with zeros at the end of some indices, up to given sizes.
    """
    dim = labels.index("b")
    padded = []
    for x in operands:
        missing = [sizes.get(label, n) - n for label, n in zip(labels, x.shape, strict=True)]
        zeros = [end for n in reversed(missing) for end in (0, n)]
        padded.append(functional.pad(x, zeros) if any(missing) else x)
    return layout.split(torch.cat(padded, dim), dim)
