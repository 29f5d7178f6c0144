"""Uses: the calls in which a tracked tensor meets a batched one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autogram._blocks import Block, Layout, Lookup, Region
from autogram._capture.autograd.cotangents import Inputs, many_vjps
from autogram._capture.recording import Channel, Recording
from autogram._capture.tracked import Tracked
from autogram.rules import Formula, Rule

Contribution = tuple[Tracked, Region, Block | Lookup]


@dataclass(eq=False, slots=True)
class Use(ABC):
    """One call, as its tap keeps it."""

    needs_graph: ClassVar[bool] = False
    """Whether its blocks come from the graph, which the pass may free behind it."""

    recording: Recording
    index: int
    """Its index among the uses of its recording."""
    function: str
    shape: tuple[int, ...]
    """The shape of its output."""
    reads: tuple[Tracked, ...]
    """The tracked tensors that it reads, once for each block."""
    is_seen: bool = field(default=True, kw_only=True)
    """Whether the recorder saw it, or autograd's graph alone showed it."""

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of its output in which the samples may lie."""
        return tuple(range(len(self.shape)))

    @abstractmethod
    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: int
    ) -> Iterable[Contribution]:
        """The blocks, from the cotangent ``(k, *output)`` and what the tap saved."""


class KeptRecipe(NamedTuple):
    """A recipe as a use keeps it, without tensors."""

    operands: tuple[Tracked | None, ...]
    """``None`` for those that are not tracked."""
    formula: Formula
    saved: slice
    """Which of the tensors saved by the tap are for this recipe."""


@dataclass(eq=False, slots=True)
class RuleUse(Use):
    """A use whose blocks a rule knows."""

    recipes: Sequence[KeptRecipe]
    rule: Rule | None
    """The rule that gave the recipes, or ``None`` where no rule is needed."""

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions to which every formula gives an index."""
        found = [recipe.formula.dims for recipe in self.recipes]
        return tuple(
            d for d in range(len(self.shape)) if all(f[d : d + 1] not in ("", "-") for f in found)
        )

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: int
    ) -> list[Contribution]:
        """The block of each operand, as factors."""
        del limit
        found: list[Contribution] = []
        for operands, formula, own in self.recipes:
            blocks = formula.blocks(layout, cotangent, *saved[own])
            for tracked, block in zip(operands, blocks, strict=True):
                if tracked is not None:
                    region = _region(tracked)
                    if formula.groups is not None:
                        region = region.split_first(formula.groups)
                    found.append((tracked, region, block))
        return found


@dataclass(eq=False, slots=True)
class FallbackUse(Use):
    """A use without a rule: rows by vector-Jacobian products through the nodes that it recorded.

    Nothing runs twice, so that randomness inside the call does not matter.
    """

    needs_graph: ClassVar[bool] = True

    dtype: torch.dtype
    """Of its output."""
    edge: GradientEdge
    """The output of the call, before the tap."""
    inputs: Inputs
    """Where each tracked tensor enters the call."""

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: int
    ) -> Iterator[Contribution]:
        """Explicit rows, some samples at a time."""
        del saved
        recording = self.recording
        largest = max(prod(self.shape), *(prod(t.shape) for t in self.reads))
        masked = one_sample_each(layout, cotangent, limit, largest)
        found = _rows_through(
            recording.channel,
            self.edge,
            self.inputs,
            (some.to(self.dtype) for some in masked),
            is_batchable=recording.is_batchable,
        )
        for tracked, block in zip(self.reads, found, strict=True):
            if block is not None:
                yield tracked, _region(tracked), block


def describe(use: Use) -> str:
    """A use by its function and the parameters that it reads."""
    names = dict.fromkeys(use.recording.names[p] for t in use.reads for p in t.sources)
    return f"`{use.function}` with " + ", ".join(f"`{name}`" for name in names)


def pull_back(
    channel: Channel, tracked: Tracked, rows: Tensor, limit: int, *, is_batchable: bool
) -> Iterator[tuple[Tensor, Block]]:
    """Rows for the parameters that a derived tensor is computed from.

    Args:
        channel: The channel of the taps.
        tracked: The derived tensor.
        rows: Its rows, ``(k, b, elements)``.
        limit: The number of elements that may be alive at once.
        is_batchable: Whether rows may go through the derivation together.
    """
    assert tracked.edge is not None
    needed = prod(tracked.shape) + sum(p.numel() for p in tracked.sources)
    parts = rows.split(max(1, limit // (rows.shape[0] * needed)), 1)
    found = _rows_through(
        channel,
        tracked.edge,
        tracked.sources,
        (some.reshape(*some.shape[:2], *tracked.shape).to(tracked.dtype) for some in parts),
        is_batchable=is_batchable,
    )
    for parameter, block in zip(tracked.sources, found, strict=True):
        if block is not None:
            yield parameter, block


def _rows_through(
    channel: Channel,
    output: GradientEdge,
    inputs: Inputs,
    cotangents: Iterable[Tensor],
    *,
    is_batchable: bool,
) -> Iterator[Block | None]:
    """Rows of each input of a piece of the graph, or ``None`` where the output misses the input.

    Args:
        channel: The channel of the taps.
        output: The edge that the cotangents are of.
        inputs: Tensors or edges.
        cotangents: ``(k, some samples, *output)`` each.
        is_batchable: Whether rows may go through the piece together.
    """
    parts: list[list[Tensor | None]] = []
    for some in cotangents:
        flat = some.flatten(0, 1)
        found = many_vjps(channel, output, inputs, flat, is_batchable=is_batchable)
        parts.append([_rows(x, some.shape[1]) for x in found])
    for pieces in zip(*parts, strict=True):
        present = [piece for piece in pieces if piece is not None]
        yield rows_block(torch.cat(present, 1)) if present else None


def one_sample_each(
    layout: Layout | None, cotangent: Tensor, limit: int, largest: int
) -> Iterator[Tensor]:
    """The cotangent of each sample alone, zero elsewhere: ``(k, some samples, *output)``.

    Args:
        layout: Where the samples lie, or ``None`` for one sample.
        cotangent: ``(k, *output)``.
        limit: The number of elements that may be alive at once.
        largest: The elements that one objective needs at least.
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


def rows_block(rows: Tensor) -> Block:
    """Explicit rows ``(k, b, *tensor)`` as a block."""
    labels = "kb" + "acdefghijlmnopqrstuvwxyz"[: rows.dim() - 2]
    return Block(f"{labels}->{labels}", (rows,))


def _region(tracked: Tracked) -> Region:
    """The region that the blocks of a tracked tensor are for."""
    return tracked.region or Region.contiguous(tracked.shape)


def _rows(found: Tensor | None, samples: int) -> Tensor | None:
    """What a batched product gives, as rows ``(k, samples, *tensor)`` in at least float32."""
    if found is None:
        return None
    dtype = torch.promote_types(found.dtype, torch.float32)
    rows: Tensor = found.to(dtype).unflatten(0, (-1, samples))
    return rows
