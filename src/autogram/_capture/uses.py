"""Uses: the calls in which a tracked tensor meets a batched one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autogram._blocks import Block, Layout, Lookup, Region
from autogram._capture.autograd.cotangents import Inputs, many_vjps
from autogram._capture.recording import Channel, Recording
from autogram._capture.tracked import Tracked
from autogram.rules import Formula, Rule

Contribution = tuple[Tracked, Region, Block | Lookup]


class Use(Protocol):
    """One call, as its tap keeps it."""

    recording: Recording
    index: int
    """Its place among the uses of its recording."""
    function: str
    shape: tuple[int, ...]
    """The shape of its output."""
    reads: tuple[Tracked, ...]
    """The tracked tensors that it reads, once for each block."""
    is_seen: bool
    """Whether the recorder saw it, or autograd's graph alone showed it."""
    needs_graph: ClassVar[bool]
    """Whether its blocks come from the graph, which the pass may free behind it."""

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of its output in which the samples may lie."""
        ...

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: int
    ) -> Iterable[Contribution]:
        """The blocks, from the cotangent ``(k, *output)`` and what the tap saved."""
        ...


class KeptRecipe(NamedTuple):
    """A recipe as a use keeps it, without tensors."""

    operands: tuple[Tracked | None, ...]
    """``None`` for those that are not tracked."""
    formula: Formula
    saved: slice
    """Which of the tensors saved by the tap are for this recipe."""


@dataclass(eq=False, slots=True)
class RuleUse:
    """A use whose blocks a rule knows."""

    needs_graph: ClassVar[bool] = False

    recording: Recording
    index: int
    function: str
    shape: tuple[int, ...]
    reads: tuple[Tracked, ...]
    recipes: tuple[KeptRecipe, ...]
    rule: Rule | None
    """The rule that gave the recipes, or ``None`` where no rule is needed."""
    is_seen: bool = True

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


@dataclass(eq=False)
class FallbackUse:
    """A use without a rule: rows by vector-Jacobian products through the nodes that it recorded.

    Nothing runs twice, so that randomness inside the call does not matter.
    """

    needs_graph: ClassVar[bool] = True

    recording: Recording
    index: int
    function: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reads: tuple[Tracked, ...]
    edge: GradientEdge
    """The output of the call, before the tap."""
    inputs: Inputs
    """Where each tracked tensor enters the call."""
    is_seen: bool = True

    @property
    def dims(self) -> tuple[int, ...]:
        """Every dimension."""
        return tuple(range(len(self.shape)))

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: int
    ) -> Iterator[Contribution]:
        """Explicit rows, some samples at a time."""
        del saved
        largest = max(prod(self.shape), *(prod(t.shape) for t in self.reads))
        parts: list[list[Tensor | None]] = []
        for masked in one_sample_each(layout, cotangent, limit, largest):
            native = masked.flatten(0, 1).to(self.dtype)
            found = many_vjps(
                self.recording.channel,
                self.edge,
                self.inputs,
                native,
                is_batchable=self.recording.is_batchable,
            )
            parts.append([_rows(x, masked.shape[1]) for x in found])
        for tracked, pieces in zip(self.reads, zip(*parts, strict=True), strict=True):
            if pieces[0] is not None:
                whole = torch.cat([x for x in pieces if x is not None], 1)
                yield tracked, _region(tracked), rows_block(whole)


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
    k = rows.shape[0]
    needed = prod(tracked.shape) + sum(p.numel() for p in tracked.sources)
    parts = []
    for some in rows.split(max(1, limit // (k * needed)), 1):
        native = some.reshape(-1, *tracked.shape).to(tracked.dtype)
        found = many_vjps(channel, tracked.edge, tracked.sources, native, is_batchable=is_batchable)
        parts.append([_rows(x, some.shape[1]) for x in found])
    for parameter, pieces in zip(tracked.sources, zip(*parts, strict=True), strict=True):
        if pieces[0] is not None:
            yield parameter, rows_block(torch.cat([x for x in pieces if x is not None], 1))


def _rows(found: Tensor | None, samples: int) -> Tensor | None:
    """What a batched product gives, as rows ``(k, samples, *tensor)`` in at least float32."""
    if found is None:
        return None
    dtype = torch.promote_types(found.dtype, torch.float32)
    rows: Tensor = found.to(dtype).unflatten(0, (-1, samples))
    return rows


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
