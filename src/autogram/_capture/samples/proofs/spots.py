"""Spots: results and inputs of nodes, whose cotangents a pass shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from graphlib import TopologicalSorter
from typing import NamedTuple

from torch import Tensor

from autogram._capture.autograd.graph import in_dense
from autogram._capture.autograd.passes import running_pass
from autogram._capture.samples.proofs.carrying import Shape
from autogram._capture.samples.survey import Survey


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
    """How a node leads to another that has taps behind it.

    Attributes:
        arrival: The input of the node.
        target: The result of the other node, whose cotangent is the sum of all that arrive there.
        moves_nothing: As :func:`.carrying.moves_nothing` says of the node.
    """

    arrival: Spot
    target: Spot
    moves_nothing: bool


def results_of_node(survey: Survey, number: int) -> tuple[Spot, ...]:
    """The results of a node."""
    metadata = survey.nodes[number]._input_metadata
    return tuple([Spot(number, i, False, tuple(x.shape)) for i, x in enumerate(metadata)])


def in_order(ways: Mapping[int, Sequence[Onward]]) -> list[int]:
    """The numbers of nodes, each behind all that lead to it."""
    behind = {number: [way.target.node for way in some] for number, some in ways.items()}
    return [*TopologicalSorter(behind).static_order()][::-1]


@contextmanager
def shown(
    survey: Survey, spots: Iterable[Spot], observe: Callable[[Spot, Tensor], None]
) -> Iterator[None]:
    """Shows the cotangents of some spots in the passes of an engine inside of a block.

    They have the shape ``(k, *shape)``, for a spot's own.
    """

    def show(spot: Spot, *cotangents: tuple[Tensor | None, ...]) -> None:
        current = running_pass()
        if current is None or current.is_blocked:
            return  # only passes from the losses to the taps show where samples are
        cotangent = cotangents[not spot.is_input][spot.position]
        if cotangent is not None and cotangent.numel():
            current.show(partial(observe, spot), in_dense(cotangent))

    with ExitStack() as stack:
        for spot in spots:
            handle = survey.nodes[spot.node].register_hook(partial(show, spot))
            stack.callback(handle.remove)
        yield
