"""Spots: results and inputs of nodes, whose cotangents a pass shows, and the ways between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from graphlib import TopologicalSorter
from typing import NamedTuple

import torch
from torch import Tensor

from autogram._blocks import Folded, Placement
from autogram._capture.autograd.graph import in_dense, nodes_leading_to, use_of
from autogram._capture.autograd.nested import running_pass
from autogram._capture.autograd.passes import Pass, hooked
from autogram._capture.samples.proofs.carrying import Shape, is_elementwise
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use


class Spot(NamedTuple):
    """A result or an input of a node, whose cotangent a pass shows. Nodes are known by number."""

    node: int
    position: int
    is_input: bool
    shape: Shape

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions in which samples may lie."""
        return tuple(range(len(self.shape)))


class Onward(NamedTuple):
    """How a node leads to another that has taps behind it."""

    results: tuple[Spot, ...]
    """Those of the node."""
    arrival: Spot
    """The input of the node."""
    target: Spot
    """The result of the other node, whose cotangent is the sum of all that arrive there."""
    moves_nothing: bool


Ways = Mapping[int, Sequence[Onward]]
"""Those of each tap, and of each node that leads to one, behind all that lead to it."""

Regular = Mapping[Spot, tuple[Folded, ...] | None]
"""The layouts that fit each spot that was reached, or ``None`` if it was zero."""

Layouts = dict[Use, tuple[Placement, ...]]
"""The layouts that fit uses."""


def results_of_node(survey: Survey, number: int) -> tuple[Spot, ...]:
    """The results of a node."""
    metadata = survey.nodes[number]._input_metadata
    return tuple([Spot(number, i, False, tuple(x.shape)) for i, x in enumerate(metadata)])


def ways_to_taps(survey: Survey) -> Ways:
    """How all nodes that lead to taps lead there."""
    reaching = nodes_leading_to([survey.nodes[x] for x in survey.uses.values()], survey.nodes)
    results = {
        node: results_of_node(survey, number)
        for number, node in enumerate(survey.nodes)
        if node in reaching
    }
    found: dict[int, list[Onward]] = {}
    for node, own in results.items():
        ways = found[survey.numbers[node]] = []
        may_stay = use_of(node) is not None or is_elementwise(node)
        for position, (following, result) in enumerate(node.next_functions):
            if following in results:
                target = results[following][result]
                arrival = Spot(survey.numbers[node], position, True, target.shape)
                stays = may_stay and all(spot.shape == target.shape for spot in own)
                ways.append(Onward(own, arrival, target, stays))
    behind = {number: [way.target.node for way in ways] for number, ways in found.items()}
    order = [*TopologicalSorter(behind).static_order()]
    return {number: found[number] for number in reversed(order)}


def spots_of(survey: Survey, ways: Ways) -> list[Spot]:
    """The results of nodes, and the inputs at which a node may have moved samples."""
    results = [spot for number in ways for spot in results_of_node(survey, number)]
    return results + [x.arrival for own in ways.values() for x in own if not x.moves_nothing]


def shown(
    survey: Survey, spots: Iterable[Spot], observe: Callable[[Spot, Tensor], None]
) -> AbstractContextManager[None]:
    """Shows the cotangents of some spots in the passes of an engine inside of a block.

    They have the shape ``(k, *shape)``, for a spot's own.
    """

    def show(spot: Spot, current: Pass, *cotangents: tuple[Tensor | None, ...]) -> None:
        cotangent = cotangents[not spot.is_input][spot.position]
        if cotangent is not None and cotangent.numel():
            current.show(partial(observe, spot), in_dense(cotangent))

    return hooked((survey.nodes[spot.node], partial(show, spot)) for spot in spots)


@contextmanager
def kept_finite(survey: Survey) -> Iterator[None]:
    """Lets all nodes read zeros for what is not finite in passes of an engine inside of a block."""

    def keep(cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if running_pass() is None:
            return None
        dense = [None if x is None else in_dense(x) for x in cotangents]
        return tuple([x if x is None else torch.where(x.isfinite(), x, 0) for x in dense])

    with ExitStack() as stack:
        for node in survey.nodes:
            if not hasattr(node, "variable"):  # else it is a leaf
                stack.callback(node.register_prehook(keep).remove)
        yield
