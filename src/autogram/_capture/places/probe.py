"""Probes: carry out one node alone, with dense cotangents of some of the samples.

For each binary digit of the samples' numbers, the node is carried out for the samples with a 1
there, and for the others. The result holds only for the values that the node saved in this
call. In another call, the node is probed again, with fewer calls of the node.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from autogram._capture.autograd.graph import in_dense
from autogram._capture.autograd.nested import running_pass
from autogram._capture.autograd.passes import Pass
from autogram._capture.autograd.recomputing import Recomputing, checkpointed_parts
from autogram._capture.limit import is_out_of_memory
from autogram._capture.places.places import EMPTY, SEVERAL, Places, Shape, are_equal
from autogram._capture.recording import Channel
from autogram._undo import undone
from autogram.errors import AutogramError

# Exponents that tell samples apart. They are shuffled, because sums such as y[b] + 2 y[b - 2]
# contain powers of two.
EXPONENTS = torch.tensor(random.Random(0).sample(range(32), 32), device="cpu")


class _CarriedOutError(Exception):
    """A node was carried out."""


class Edge(NamedTuple):
    """A result of a node, at which cotangents arrive."""

    node: Any
    number: int

    @property
    def shape(self) -> Shape:
        """The shape of the result."""
        return tuple(self.node._input_metadata[self.number].shape)


class Probe(NamedTuple):
    """The results of probing a node."""

    results: list[Places | None]
    """The places of the node's results for which it was carried out."""
    inputs: dict[int, Places]
    """The places of the node's inputs that need a gradient, by position."""
    inside: list[Places]
    """The places of each use inside the node, in the order in which they were shown."""


@dataclass(eq=False)
class Prober:
    """Carries nodes out, and sees the uses inside them.

    PyTorch's own nodes are called in a pass that reaches no other node. This calls no hooks of
    the user or of ``fully_shard``, which may wait for other processes. Functions in Python run in
    a separate pass of PyTorch, which ends after them.

    Args:
        channel: The channel of the uses that are shown.
        nodes: All nodes of the graph.
    """

    channel: Channel
    nodes: Sequence[Any] = ()
    shown: list[tuple[Any, Tensor]] = field(default_factory=list, init=False)

    def __call__(self, use: Any, saved: Sequence[Tensor], cotangent: Tensor) -> None:
        """Takes a use, with its cotangent ``(1, *shape)``."""
        del saved
        self.shown.append((use, cotangent[0]))

    def gradients(
        self, node: Any, cotangents: Sequence[Tensor | None]
    ) -> dict[Any, Tensor | None] | None:
        """The gradients of a node's inputs, by position, and the cotangents of uses inside it.

        ``None`` if the node refuses the cotangents of its results.
        """
        is_python = isinstance(node, BackwardCFunction)
        if self.channel.before_pass is not None and (is_python or self._parts):
            return None  # either may wait for other processes
        self.shown.clear()
        again = Recomputing(self._parts)
        try:
            with undone(again.release):
                carry_out = self._in_pass if is_python else self._called
                gradients = carry_out(again, node, cotangents)
            return {**dict(enumerate(gradients)), **dict(self.shown)}
        except AutogramError:
            raise
        except Exception as error:  # a node may refuse cotangents that occur in no pass
            if is_out_of_memory(error):
                raise
            return None
        finally:
            self.shown.clear()

    @cached_property
    def _parts(self) -> dict[Any, None]:
        """The parts of checkpoints in the graph."""
        return checkpointed_parts(self.nodes)

    def _called(
        self, again: Recomputing, node: Any, cotangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The gradients from calling a node."""
        gradients = again.call(self._pass(), lambda: node(*cotangents))
        return gradients if isinstance(gradients, tuple) else (gradients,)

    def _in_pass(
        self, again: Recomputing, node: Any, cotangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The gradients from a pass through a node's results."""
        taken: list[Sequence[Tensor | None]] = []

        def take(gradients: Sequence[Tensor | None], _: object) -> None:
            current = running_pass()
            if current is not None and current.receiver is self:
                taken.append(gradients)
                again.note_pass()
                raise _CarriedOutError  # to stop the pass

        pairs = [(GradientEdge(node, i), x) for i, x in enumerate(cotangents) if x is not None]
        edges, present = [edge for edge, _ in pairs], [x for _, x in pairs]
        following = [GradientEdge(*edge) for edge in node.next_functions if edge[0] is not None]
        handle = node.register_hook(take)
        try:
            with suppress(_CarriedOutError), again.group:
                self._pass().differentiate(edges, following, present)
        finally:
            handle.remove()
        (gradients,) = taken
        return gradients

    def _pass(self) -> Pass:
        """A pass that other processes do not join."""
        return Pass(self.channel, self, is_alone=True)

    def probe(
        self, node: Any, results: Sequence[Places | None], earlier: Probe | None = None
    ) -> tuple[Probe, list[Any]] | None:
        """The places of a node's inputs and of uses inside it.

        Args:
            node: The node.
            results: The places of its results, ``None`` for those without a cotangent.
            earlier: The result of probing the node in an earlier graph.

        Returns:
            The result, and the uses; or ``None`` if the node cannot be carried out.
        """
        if earlier is not None and all(map(are_equal, earlier.results, results)):
            uses = self._confirmed(node, earlier)
            if uses is not None:
                return earlier, uses
        grids = [None if places is None else places.grid() for places in results]
        dense = [_dense(metadata) for metadata in node._input_metadata]
        inputs = {i: Edge(*edge).shape for i, edge in enumerate(node.next_functions) if edge[0]}
        digits, uses = _digits(results), list[Any]()
        has: tuple[dict[Any, list[Tensor]], dict[Any, list[Tensor]]] = {}, {}
        for digit in range(digits):
            for bit, marks in enumerate(has):
                cotangents = [
                    None if grid is None else _chosen(grid, digit, bit, full)
                    for grid, full in zip(grids, dense, strict=True)
                ]
                gradients = self.gradients(node, cotangents)
                if gradients is None:
                    return None
                uses = [key for key in gradients if not isinstance(key, int)]
                for key, shape in [*inputs.items(), *[(use, use.shape) for use in uses]]:
                    marks.setdefault(key, []).append(_has(gradients[key], shape))
        counts = dict.fromkeys((*inputs, *uses), digits)
        if any({key: len(of_key) for key, of_key in marks.items()} != counts for marks in has):
            return None  # a use was shown in only some of the calls
        others, ones = has
        places = {key: _places_of(ones[key], others[key]) for key in ones}
        return Probe([*results], {i: places[i] for i in inputs}, [places[x] for x in uses]), uses

    def _confirmed(self, node: Any, earlier: Probe) -> list[Any] | None:
        """The uses inside a node, if an earlier probe's result also holds in this graph.

        It multiplies each sample's cotangent by a separate power of two. If all samples stay
        where they were, this multiplies each number that the node returns, too, bit for bit.
        """
        dense = [_dense(metadata) for metadata in node._input_metadata]
        pairs = [*zip(dense, earlier.results, strict=True)]
        plain = self.gradients(node, [None if of is None else x for x, of in pairs])
        if plain is None:
            return None
        uses = [key for key in plain if not isinstance(key, int)]
        if len(uses) != len(earlier.inside):
            return None
        places_of = {**earlier.inputs, **dict(zip(uses, earlier.inside, strict=True))}
        widest = min(torch.finfo(x.dtype).max for x in dense)
        exponents = EXPONENTS if widest > 2.0**64 else EXPONENTS[EXPONENTS < 8]  # float16: to 2**16
        unit, samples = 1, 1 << _digits(earlier.results)
        while unit < samples:
            scaled = [None if p is None else x * _powers(p, unit, exponents, x) for x, p in pairs]
            others = self.gradients(node, scaled)
            if others is None or others.keys() != plain.keys():
                return None
            for key, places in places_of.items():
                if not _are_scaled(plain[key], others[key], places, unit, exponents):
                    return None
            unit *= len(exponents)
        return uses


def _are_scaled(
    one: Tensor | None, other: Tensor | None, places: Places, unit: int, exponents: Tensor
) -> bool:
    """Whether each sample's numbers, in known places, are multiplied by its power."""
    if one is None or other is None:
        return one is other
    if one.layout != torch.strided or one.shape != other.shape or one.shape != places.shape:
        return False
    grid = places.grid().to(one.device)
    stays = one * _powers(places, unit, exponents, one) == other
    stays = torch.where(grid == EMPTY, other == 0, stays | (grid == SEVERAL))
    return bool((stays & other.isfinite()).all())


def _powers(places: Places, unit: int, exponents: Tensor, like: Tensor) -> Tensor:
    """A power of two for each place, by the digit of its sample's number at ``unit``."""
    grid = places.grid()
    powers = exponents[grid.clamp(min=0) // unit % len(exponents)].double().exp2()
    is_of_one = (grid != EMPTY) & (grid != SEVERAL)
    return torch.where(is_of_one, powers, 1).to(like.device, like.real.dtype)


def _digits(results: Sequence[Places | None]) -> int:
    """The number of binary digits that tell the samples of some results apart."""
    there = torch.cat([places.samples.flatten() for places in results if places is not None])
    largest = int(there.masked_fill(there == SEVERAL, 0).max()) if there.numel() else 0
    return max(largest, 1).bit_length()


def _dense(metadata: Any) -> Tensor:
    """A cotangent without zeros, whose numbers do not cancel."""
    shape = tuple(metadata.shape)
    numbers = torch.arange(1, prod(shape) + 1, dtype=torch.double, device="cpu")
    numbers = (numbers * 1.618).sin() + 2
    return numbers.view(shape).to(dtype=metadata.dtype, device=metadata.device)


def _chosen(grid: Tensor, digit: int, bit: int, full: Tensor) -> Tensor:
    """The cotangent of samples with a given bit in one digit of their numbers, zero elsewhere."""
    is_chosen = (grid != EMPTY) & (grid >> digit & 1 == bit) | (grid == SEVERAL)
    return torch.where(is_chosen.to(full.device), full, 0)


def _has(gradient: Tensor | None, shape: Shape) -> Tensor:
    """Where a gradient is not zero, for an input to whose shape it is summed."""
    if gradient is None:
        return torch.zeros(shape, dtype=torch.bool, device="cpu")
    has = in_dense(gradient.detach()).ne(0).cpu()
    while has.dim() > len(shape):
        has = has.any(0)
    for dim, size in enumerate(shape):
        if has.shape[dim] != size:
            has = has.any(dim, keepdim=True)
    return has.expand(shape)


def _places_of(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Places:
    """The places, from where a gradient is not zero for each digit of a sample's number."""
    one, other = torch.stack(tuple(ones)), torch.stack(tuple(others))
    powers = 1 << torch.arange(len(one), device="cpu").view(-1, *(1,) * (one.dim() - 1))
    samples = (one * powers).sum(0)
    samples = samples.masked_fill(~(one | other).any(0), EMPTY)
    return Places.of(samples.shape, samples.masked_fill((one & other).any(0), SEVERAL))
