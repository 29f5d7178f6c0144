"""Tails: nodes between the losses and the nearest taps, which read parameters in no torch call.

Where a gradient is differentiated again, autograd multiplies cotangents by weights itself, and no
torch call shows that. Its graph does: a node that leads to taps and reads parameters, or tensors
that are computed from parameters alone, is a use. A matrix product has the factors of its rows; any
other node gets its rows sample by sample through this node alone, where vector-Jacobian products of
the losses would go through the whole tail for each. These products remain for parameters that are
read by a node inside of a recorded call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from autogram._blocks import Layout, Limit, Region
from autogram._capture.autograd.cotangents import vjps_of_node
from autogram._capture.autograd.graph import in_dense, is_tap_of, nodes_from, nodes_leading_to
from autogram._capture.autograd.passes import running_pass
from autogram._capture.recording import Channel, Recording
from autogram._capture.samples.proofs.carrying import Edge, moves_nothing
from autogram._capture.tracked import Tracked, track_parameter
from autogram._capture.uses import Contribution, FallbackUse, KeptRecipe, RuleUse, Use
from autogram.rules import find_rule
from autogram.rules import product as factors

# The most elements that rows of a tensor may have which is computed from parameters alone.
_LARGEST = 2**26

_PRODUCT = "MmBackward0"  # C = A B, with dB = A^T dC

_Edge = tuple[Any, int]
"""A node and one of its results."""


class TailUse(NamedTuple):
    """A use in a tail.

    Attributes:
        use: The use.
        output: The result of a node whose cotangent the use is shown.
        product: The node of a matrix product that has saved a factor, or ``None``.
    """

    use: Use
    output: GradientEdge
    product: Any = None

    def tensors(self) -> tuple[Tensor, ...]:
        """What a node saved for the use."""
        return () if self.product is None else (self.product._saved_self.detach(),)


@dataclass(eq=False, slots=True)
class _NodeUse(FallbackUse):
    """What a node reads in any other way: rows by vector-Jacobian products through the node alone.

    Products by a pass would also go through other nodes that read the same parameters.
    """

    inputs: tuple[GradientEdge, ...]

    def vjps(self, cotangents: Tensor) -> list[Tensor | None]:
        """Products of cotangents ``(n, *output)`` with the derivatives by each input."""
        return vjps_of_node(self.recording.channel, self.edge, self.inputs, cotangents)


@dataclass(eq=False, slots=True)
class _ThroughUse(RuleUse):
    """A product of a constant with parameters, which an element-wise node reads.

    No pass reaches the product. Its cotangent has the samples where that of the node has them.
    """

    output: GradientEdge
    product: GradientEdge

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: Limit
    ) -> list[Contribution]:
        """The block, by the cotangent of the product."""
        channel = self.recording.channel
        (found,) = vjps_of_node(channel, self.output, (self.product,), cotangent)
        return [] if found is None else RuleUse.contributions(self, layout, found, saved, limit)


def uses_in_tail(
    channel: Channel, losses: Tensor, nodes: Sequence[Any], parameters: Mapping[Tensor, str]
) -> list[TailUse]:
    """The uses among the nodes of a tail, if they cost less than products through all of the tail.

    Args:
        channel: The channel of the taps.
        losses: The objectives.
        nodes: The tail, with the taps and the leaves at its ends.
        parameters: The parameters of J that it reaches, with their names.

    Returns:
        One for each result of such a node. None for a penalty, which reads parameters where there
        is but a number for each objective; and none of parameters that are also read by a node
        whose cotangent in the tail alone no pass shows.
    """
    leaves = [x for x in nodes if getattr(x, "variable", None) in parameters]
    taps = [x for x in nodes if is_tap_of(channel, x)]
    leading = nodes_leading_to(taps, nodes)
    reading = nodes_leading_to(leaves, nodes) - leading
    readers = [x for x in nodes if x in leading and x not in taps and _reads(x, reading)]
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
        others = {p: name for p, name in parameters.items() if p not in read_there}
        return uses_in_tail(channel, losses, nodes, others)
    recording = Recording(channel, dict(parameters))
    tracked: dict[_Edge, Tracked] = {}

    def read(edge: _Edge) -> Tracked:
        if edge not in tracked:
            tracked[edge] = _tracked(*edge, reading, parameters)
        return tracked[edge]

    found: list[TailUse] = []
    for node in readers:
        edges = dict.fromkeys(edge for edge in node.next_functions if edge[0] in reading)
        products = {e: x for e in edges if (x := _product(node, e, reading)) is not None}
        for edge, product in products.items():
            operand = read(product.next_functions[1])
            found.append(_by_factors(recording, -1 - len(found), node, edge, product, operand))
        rest = [edge for edge in edges if edge not in products]
        for result in range(len(node._input_metadata) if rest else 0):
            output, reads = GradientEdge(node, result), tuple(map(read, rest))
            inputs = tuple(GradientEdge(*edge) for edge in rest)
            known = _described(recording, -1 - len(found), output)
            dtype = node._input_metadata[result].dtype
            use = _NodeUse(*known, reads, dtype, output, inputs, is_seen=False)
            found.append(TailUse(use, output))
    derived = [prod(of.shape) for of in tracked.values() if of.region is None]
    return [] if losses.numel() * max(derived, default=0) > _LARGEST else found


def _product(node: Any, edge: _Edge, reading: Collection[Any]) -> Any:
    """The matrix product by which a node reads parameters behind an edge, if it is one.

    It is the node itself, or a product with a constant that the node multiplies element by element.
    Of complex numbers, a factor would have to be conjugated.
    """
    if node._input_metadata[0].dtype.is_complex:
        return None
    if node.name() == _PRODUCT:
        return node if node.next_functions.index(edge) == 1 else None
    child, result = edge
    if child.name() != _PRODUCT or child.next_functions[0][0] in reading:
        return None
    (of, *others), given = node._input_metadata, tuple(child._input_metadata[result].shape)
    places = [i for i, x in enumerate(node.next_functions) if x == edge]
    if others or not all(moves_nothing(Edge(node, i, tuple(of.shape), given)) for i in places):
        return None
    return child


def _by_factors(
    recording: Recording, index: int, node: Any, edge: _Edge, product: Any, operand: Tracked
) -> TailUse:
    """The use of the second factor of a product, whose first factor is saved."""
    output, rule = GradientEdge(node, 0), find_rule(torch.mm)
    formula = factors(operand.sources[0], "to,ti->io").formula
    recipes = [KeptRecipe((operand,), formula, slice(0, 1))]
    known = *_described(recording, index, output), (operand,), recipes, rule
    if product is node:
        return TailUse(RuleUse(*known), output, product)
    return TailUse(_ThroughUse(*known, output, GradientEdge(*edge)), output, product)


def _described(
    recording: Recording, index: int, output: GradientEdge
) -> tuple[Recording, int, str, tuple[int, ...]]:
    """What all uses have."""
    shape = tuple(output.node._input_metadata[output.output_nr].shape)
    return recording, index, output.node.name(), shape


def _reads(node: Any, reading: Collection[Any]) -> bool:
    """Whether a node has an input that is computed from parameters alone."""
    return any(child in reading for child, _ in node.next_functions)


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
    shape, edge = tuple(of.shape), GradientEdge(node, result)
    return Tracked(sources, None, shape, of.dtype, of.device, 0, edge)


def _sources(
    nodes: Iterable[Any], reading: Collection[Any], parameters: Mapping[Tensor, str]
) -> dict[Tensor, None]:
    """The parameters that some nodes read, or tensors that are computed from parameters alone."""
    starts = dict.fromkeys(nodes)
    found = nodes_from(starts, lambda node: node not in reading and node not in starts)
    leaves = [x for x in found if x in reading and getattr(x, "variable", None) in parameters]
    return {leaf.variable: None for leaf in leaves}


@contextmanager
def showing(uses: Iterable[TailUse]) -> Iterator[None]:
    """Shows the cotangents of uses in a tail to the passes of their engine, as taps do."""
    by_node: dict[Any, list[TailUse]] = {}
    for use in uses:
        by_node.setdefault(use.output.node, []).append(use)
    with ExitStack() as stack:
        for node, own in by_node.items():
            stack.callback(node.register_prehook(partial(_show, own)).remove)
        yield


def _show(uses: Iterable[TailUse], cotangents: tuple[Tensor | None, ...]) -> None:
    """Shows the cotangents of a node's results."""
    current = running_pass()
    if current is None or current.is_blocked:
        return
    for each in uses:
        cotangent, recording = cotangents[each.output.output_nr], each.use.recording
        if cotangent is None or recording.channel is not current.channel:
            continue
        if current.reach(recording):
            # Not here: what a checkpoint computes again can be read once in a pass.
            current.show(each.use, each.tensors, in_dense(cotangent), is_kept=True)
