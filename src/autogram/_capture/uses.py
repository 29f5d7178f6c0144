"""Uses: the calls in which a tracked tensor meets a batched one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._blocks import Block, Layout, Limit, Lookup, Region, as_real, joined, rows_block
from autogram._capture.autograd.cotangents import Inputs, many_vjps
from autogram._capture.recording import Channel, Recording
from autogram._capture.tracked import Tracked
from autogram.errors import RuleError
from autogram.rules import Formula

Contribution = tuple[Tracked, Region, Block | Lookup]


@dataclass(eq=False, slots=True)
class Use(ABC):
    """One call in which parameters meet samples. The tap on its result keeps this object."""

    recording: Recording
    index: int
    """The number of the use among the uses of its recording."""
    function: str
    shape: tuple[int, ...]
    """The shape of the output."""
    reads: tuple[Tracked, ...]
    """The tracked tensors that the call reads, once for each block."""
    is_seen: bool = field(default=True, kw_only=True)
    """Whether the recorder saw the call. If not, autograd's graph has shown it."""

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the output in which the samples may be."""
        return tuple(range(len(self.shape)))

    @property
    def depth(self) -> int:
        """How many dimensions, from the first one on, may hold the samples together."""
        return len(self.shape)

    @abstractmethod
    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: Limit
    ) -> list[Contribution]:
        """The blocks, from the cotangent ``(k, *output)`` and the tensors that the tap saved."""


class KeptRecipe(NamedTuple):
    """A recipe as a use keeps it, without tensors."""

    operands: tuple[Tracked | None, ...]
    """The operands, ``None`` where an operand is not tracked."""
    formula: Formula
    saved: slice
    """Which of the tensors saved by the tap are for this recipe."""


@dataclass(eq=False, slots=True)
class RuleUse(Use):
    """A use whose blocks a rule knows."""

    recipes: Sequence[KeptRecipe]
    rule: Callable[..., Any] | None
    """The function of `rules` that knows the call, or ``None`` where there is no call."""

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions to which every formula gives an index."""
        each = [{d for d, x in enumerate(r.formula.dims) if x != "-"} for r in self.recipes]
        return tuple(sorted(set(range(len(self.shape))).intersection(*each)))

    @property
    def depth(self) -> int:
        """The number that every formula allows."""
        return min([len(self.shape), *[recipe.formula.depth for recipe in self.recipes]])

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: Limit
    ) -> list[Contribution]:
        """The block of each operand, as factors."""
        del limit
        found: list[Contribution] = []
        for operands, formula, own in self.recipes:
            blocks = formula.blocks(layout, cotangent, *saved[own])
            for tracked, block in zip(operands, blocks, strict=True):
                if tracked is not None:
                    region = tracked.region or Region.contiguous(tracked.shape)
                    if formula.groups is not None:
                        region = region.split_first(formula.groups)
                    if isinstance(block, Block) and len(block.parameter) != len(region.shape):
                        raise RuleError(
                            f"The rule of {describe(self)} gives a tensor {len(block.parameter)} "
                            f"dimensions in the equation `{block.equation}`, but it has "
                            f"{len(region.shape)}. Write an index for each dimension of the "
                            "tensor after the arrow, `1` for one along which it is broadcast."
                        )
                    found.append((tracked, region, block))
        return found


@dataclass(eq=False, slots=True)
class FallbackUse(Use):
    """A use without a rule: rows by vector-Jacobian products through the nodes of the call.

    The call does not run again, so that randomness inside of the call does not matter.
    """

    edge: GradientEdge
    """The output of the call in the graph, before the tap."""
    inputs: Inputs
    """Where each tracked tensor enters the call."""

    @classmethod
    def of(
        cls,
        recording: Recording,
        function: str,
        output: Tensor,
        reads: tuple[Tracked, ...],
        inputs: Inputs,
        *,
        is_seen: bool = True,
    ) -> FallbackUse:
        """The next use of a recording, for one tensor of the results of a call."""
        index, shape, edge = recording.count, tuple(output.shape), get_gradient_edge(output)
        return cls(recording, index, function, shape, reads, edge, inputs, is_seen=is_seen)

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: Limit
    ) -> list[Contribution]:
        """Explicit rows, some samples at a time."""
        del saved
        largest = max(prod(self.shape), *(prod(t.shape) for t in self.reads))
        cotangents = one_sample_each(layout, cotangent, limit.elements, largest)
        pairs = zip(self.reads, _rows_by(self.vjps, len(self.inputs), cotangents), strict=True)
        return [
            (x, x.region or Region.contiguous(x.shape), block)
            for x, block in pairs
            if block is not None
        ]

    def vjps(self, cotangents: Tensor) -> list[Tensor | None]:
        """Products of cotangents ``(n, *output)`` with the derivatives by each input."""
        return many_vjps(self.recording.channel, self.edge, self.inputs, cotangents)


def describe(use: Use) -> str:
    """A use by its function and the parameters that it reads."""
    names = dict.fromkeys(use.recording.names[p] for t in use.reads for p in t.sources)
    return f"`{use.function}` with " + ", ".join(f"`{name}`" for name in names)


def pull_back(
    channel: Channel, tracked: Tracked, rows: Tensor, limit: Limit
) -> list[tuple[Tensor, Block]]:
    """Rows for the parameters of a derived tensor, from its ``rows``: ``(k, b, elements)``."""
    assert tracked.edge is not None
    needed = prod(tracked.shape) + sum(p.numel() for p in tracked.sources)
    parts = rows.split(max(1, limit.elements // (rows.shape[0] * needed)), 1)
    of_samples = (some.reshape(*some.shape[:2], *tracked.shape) for some in parts)
    is_complex, dtype = tracked.dtype.is_complex, tracked.dtype
    cotangents = ((torch.view_as_complex(x) if is_complex else x).to(dtype) for x in of_samples)
    vjps = partial(many_vjps, channel, tracked.edge, tracked.sources)
    found = _rows_by(vjps, len(tracked.sources), cotangents)
    pairs = zip(tracked.sources, found, strict=True)
    return [(parameter, block) for parameter, block in pairs if block is not None]


def _rows_by(
    vjps: Callable[[Tensor], list[Tensor | None]], count: int, cotangents: Iterable[Tensor]
) -> Iterator[Block | None]:
    """Rows of some inputs, in at least float32, or ``None`` where the output misses an input.

    A part of the cotangents is ``(k, some samples, *output)``.
    """
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    for some in cotangents:
        found = vjps(some.flatten(0, 1))
        for rows, part in zip(found, parts, strict=True):
            if rows is not None:
                rows = as_real(rows)
                dtype = torch.promote_types(rows.dtype, torch.float32)
                part.append(rows.to(dtype).unflatten(0, some.shape[:2]))
    for part in parts:
        yield rows_block(joined(part, 1)) if part else None


def one_sample_each(
    layout: Layout | None, cotangent: Tensor, limit: int, largest: int
) -> Iterator[Tensor]:
    """The cotangent of each sample alone, zero elsewhere: ``(k, some samples, *output)``.

    As many go together as the ``limit`` allows, of which one objective needs ``largest`` elements.
    """
    if layout is None:
        yield cotangent.unsqueeze(1)
        return
    step = max(1, limit // max(1, largest * cotangent.shape[0]))
    owners = layout.owners(cotangent[0])
    for chosen in torch.arange(layout.batch, device=cotangent.device).split(step):
        own = chosen.view(-1, *(1,) * (cotangent.dim() - 1)) == owners
        # A selection and not a product, which would spread one sample's infinities to the others.
        yield torch.where(own, cotangent.unsqueeze(1), 0)
