"""Spots: results and inputs of nodes, whose cotangents a pass shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from torch import Tensor

from autogram._blocks import Folded, Placement
from autogram._capture.autograd.graph import in_dense
from autogram._capture.autograd.passes import Pass, hooked
from autogram._capture.samples.proofs.carrying import Shape
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
