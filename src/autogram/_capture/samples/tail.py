"""Tails: nodes between the losses and the nearest taps, which read parameters in no torch call.

Where a gradient is differentiated again, autograd multiplies cotangents by weights itself, and no
torch call shows that. Its graph does: a node that leads to taps and reads parameters, or tensors
that are computed from parameters alone, is a use. Of what a node reads by a way (see :mod:`.ways`),
there are factors. Any other node gets its rows sample by sample through this node alone, where
vector-Jacobian products of the losses would go through the whole tail for each. These products
remain for parameters that are read by a node inside of a recorded call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from autogram._blocks import Layout, Limit, Region
from autogram._capture.autograd.cotangents import carried_out, vjps_of_node
from autogram._capture.autograd.graph import (
    in_dense,
    is_tap_of,
    nodes_from,
    nodes_leading_to,
)
from autogram._capture.autograd.passes import Pass, hooked
from autogram._capture.recording import Channel, Recording
from autogram._capture.samples.ways import NodeResult, TailWay, ways_of
from autogram._capture.tracked import Tracked, real_shape, track_parameter
from autogram._capture.uses import Contribution, FallbackUse, KeptRecipe, RuleUse
from autogram.rules import find_rule, positions
from autogram.rules import product as factors

# The most elements that rows of a tensor may have which is computed from parameters alone.
_LARGEST = 2**26


@dataclass(eq=False, slots=True)
class _NodeUse(FallbackUse):
    """What a node reads in any other way: rows by vector-Jacobian products through the node alone.

    Products by a pass would also go through other nodes that read the same parameters.
    """

    inputs: tuple[GradientEdge, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """Nothing that the node saved."""
        return ()

    def vjps(self, cotangents: Tensor) -> list[Tensor | None]:
        """Products of cotangents ``(n, *output)`` with the derivatives by each input."""
        return vjps_of_node(self.recording.channel, self.edge, self.inputs, cotangents)


@dataclass(eq=False, slots=True)
class _WayUse(RuleUse):
    """What a node reads by a way, at whose end no pass shows the cotangent.

    It has the samples where the cotangent of the node has them.
    """

    edge: GradientEdge
    way: TailWay

    def tensors(self) -> tuple[Tensor, ...]:
        """The factor that the node of a matrix product saved."""
        if self.way.product is None:
            return ()
        first = self.way.product._saved_self.detach()
        return (first.reshape(*self.shape[:-1], first.shape[1]),)

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: Limit
    ) -> list[Contribution]:
        """The block, by the cotangent at the end of the way."""
        if nodes := [step.node for step in self.way.steps]:
            (found,) = carried_out(self.recording.channel, self._carry, cotangent, nodes, 1)
            if found is None:
                return []
            cotangent = found
        return RuleUse.contributions(self, layout, cotangent, saved, limit)

    def _carry(self, cotangent: Tensor) -> dict[int, Tensor]:
        """What arrives at the end of the way, if anything does."""
        for step in self.way.steps:
            found = step.carry(cotangent)
            if found is None:
                return {}
            behind, result = step.edge
            cotangent = in_dense(found).to(behind._input_metadata[result].dtype)
        return {0: cotangent}


TailUse = _NodeUse | _WayUse
"""A use in a tail, which is shown the cotangent of its ``edge``: a result of a node."""


def uses_in_tail(
    channel: Channel, losses: Tensor, nodes: Sequence[Any], parameters: Mapping[Tensor, str]
) -> list[TailUse]:
    """The uses among the nodes of a tail, if they cost less than products through all of the tail.

    There is one for each result of such a node. None for a penalty, which reads parameters where
    there is but a number for each objective; and none of parameters that are also read by a node
    whose cotangent in the tail alone no pass shows.

    Args:
        channel: The channel of the taps.
        losses: The objectives.
        nodes: The tail, with the taps and the leaves at its ends.
        parameters: The parameters of J that it reaches, with their names.
    """
    leaves = [x for x in nodes if getattr(x, "variable", None) in parameters]
    taps = [x for x in nodes if is_tap_of(channel, x)]
    leading = nodes_leading_to(taps, nodes)
    reading = nodes_leading_to(leaves, nodes) - leading
    others = [x for x in nodes if x in leading and x not in taps]
    readers = [x for x in others if any(child in reading for child, _ in x.next_functions)]
    between = nodes_leading_to(readers, nodes) & leading
    sizes = [prod(of.shape) for node in between for of in node._input_metadata]
    if max(sizes, default=0) <= losses.numel():
        return []
    behind = set(nodes_from(taps))
    # Parts of recorded calls, whose cotangents come through taps as well, and custom autograd
    # Functions, which run in passes alone. The other nodes are all that read the other parameters.
    closed = [x for x in readers if x in behind or isinstance(x, BackwardCFunction)]
    if closed:
        read_there = _sources(closed, reading, parameters)
        left = {p: name for p, name in parameters.items() if p not in read_there}
        return uses_in_tail(channel, losses, nodes, left)
    recording = Recording(channel, dict(parameters))
    tracked: dict[NodeResult, Tracked] = {}

    def read(edge: NodeResult) -> Tracked:
        if edge not in tracked:
            tracked[edge] = _tracked(*edge, reading, parameters)
        return tracked[edge]

    found: list[TailUse] = []
    for node in readers:
        ways, results = ways_of(node, reading), node._input_metadata
        for way in [way for some in ways.values() for way in some or ()]:
            described = recording, -1 - len(found), node.name(), tuple(results[0].shape)
            found.append(_by_way(described, GradientEdge(node, 0), way, read(way.edge)))
        rest = [edge for edge, some in ways.items() if some is None]
        reads, inputs = tuple(map(read, rest)), tuple(GradientEdge(*edge) for edge in rest)
        for i, of in enumerate(results if rest else ()):
            described = recording, -1 - len(found), node.name(), tuple(of.shape)
            output = GradientEdge(node, i)
            found.append(_NodeUse(*described, reads, output, inputs, is_seen=False))
    derived = [prod(of.shape) for of in tracked.values() if of.region is None]
    return [] if losses.numel() * max(derived, default=0) > _LARGEST else found


def _by_way(
    described: tuple[Recording, int, str, tuple[int, ...]],
    output: GradientEdge,
    way: TailWay,
    operand: Tracked,
) -> TailUse:
    """The use of what a node reads by a way."""
    letters = positions(len(described[-1]))
    if way.product is None:  # summed along dimensions in which the operand is broadcast
        own = zip(letters[len(letters) - len(operand.shape) :], operand.shape, strict=True)
        target = "".join(["1" if size == 1 else letter for letter, size in own])
        equation, rule, saved = f"{letters}->{target}", find_rule(torch.add), slice(0)
    else:
        equation = f"{letters},{letters[:-1]}i->i{letters[-1]}"
        rule, saved = find_rule(torch.mm), slice(1)
    recipes = [KeptRecipe((operand,), factors(operand.sources[0], equation).formula, saved)]
    return _WayUse(*described, (operand,), recipes, rule, output, way)


def _tracked(
    node: Any, result: int, reading: Collection[Any], parameters: Mapping[Tensor, str]
) -> Tracked:
    """A parameter, or a result of a node that is computed from parameters alone."""
    transposed, leaf = 0, node
    while leaf.name() == "TBackward0":
        transposed, leaf = transposed + 1, leaf.next_functions[0][0]
    parameter: Tensor | None = getattr(leaf, "variable", None)
    if parameter is not None:
        whole = track_parameter(parameter)
        if transposed % 2 == 0:
            return whole
        if whole.region == Region.of(parameter):
            view = parameter.detach().t()
            return Tracked.of(view, (parameter,), Region.of(view), whole.region)
    sources = tuple(_sources([node], reading, parameters))
    of = node._input_metadata[result]
    shape, edge = real_shape(of), GradientEdge(node, result)
    return Tracked(sources, None, shape, of.dtype, of.device, 0, edge)


def _sources(
    nodes: Iterable[Any], reading: Collection[Any], parameters: Mapping[Tensor, str]
) -> dict[Tensor, None]:
    """The parameters that some nodes read, or tensors that are computed from parameters alone."""
    starts = dict.fromkeys(nodes)
    found = nodes_from(starts, lambda node: node not in reading and node not in starts)
    leaves = [x for x in found if x in reading and getattr(x, "variable", None) in parameters]
    return {leaf.variable: None for leaf in leaves}


def showing(uses: Iterable[TailUse]) -> AbstractContextManager[None]:
    """Shows the cotangents of uses in a tail to the passes of their engine, as taps do."""

    def show(use: TailUse, current: Pass, _: object, cotangents: Sequence[Tensor | None]) -> None:
        cotangent = cotangents[use.edge.output_nr]
        is_ours = use.recording.channel is current.channel
        if cotangent is not None and is_ours and current.reach(use.recording):
            # Not here: what a checkpoint computes again can be read once in a pass.
            current.show(partial(current.keep, use, use.tensors), in_dense(cotangent))

    return hooked((use.edge.node, partial(show, use)) for use in uses)
