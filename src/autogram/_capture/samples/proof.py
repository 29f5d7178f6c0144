"""Proofs: which values decide where the samples lie, so that the rest of a step may change.

While samples are sought by zeros, the cotangents of all nodes are looked at that the pass goes
through. By definition, the samples lie along one dimension of the losses. A proof goes from there
to the taps, node by node. It holds if

- in the result of each node, samples lie in regular places along some dimension. Where several
  dimensions fit what is seen, what is said of one must be true of all;
- each node carries that dimension to its inputs (see :mod:`.carrying`), so that
  no value can move a sample;
- the parts that add up to a cotangent have their samples in the same dimension as their sum;
- no values let more dimensions fit than did before, as a diagonal of ones does.

Where a node does not carry the dimension, the values that it saved decide: constants are compared
at each call. With anything else, the samples are sought at each call. A cotangent that is zero
shows nothing, and moves nothing as long as it is zero, which is looked at in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._capture.autograd.graph import in_dense, is_any_tap, nodes_leading_to
from autogram._capture.autograd.passes import running_pass
from autogram._capture.samples.carrying import Edge, Shape, carried, is_packed, moves_nothing
from autogram._capture.samples.survey import Survey, kind_of_node

# Elements of a constant that is compared at each call; a larger one is taken for one that changes.
_LARGEST = 2**22


class Spot(NamedTuple):
    """A result or an input of a node, of which a pass shows the cotangent."""

    node: int
    """The number of the node in the survey."""
    position: int
    """The number of the result, or of the input."""
    is_input: bool
    shape: Shape

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions in which samples may lie."""
        return tuple(range(len(self.shape)))


class Constant(NamedTuple):
    """A tensor that a node saved, which requires no gradient, and whose values decide."""

    node: int
    """The number of the node in the survey."""
    field: str
    entry: int | None
    """Which of them, where the field holds several."""

    def value(self, survey: Survey) -> Tensor:
        """The tensor, in a graph with an equal survey."""
        found = getattr(survey.nodes[self.node], self.field)
        tensor: Tensor = found if self.entry is None else found[self.entry]
        return tensor


@dataclass(frozen=True)
class Proof:
    """What the places of samples depend on, beside the graph.

    Attributes:
        constants: The constants that decide.
        silent: The spots that had a cotangent of zero.
        is_for_one_call: Whether other values decide, too.
    """

    constants: tuple[Constant, ...]
    silent: tuple[Spot, ...]
    is_for_one_call: bool


@contextmanager
def shown(
    survey: Survey, spots: Iterable[Spot], observe: Callable[[Spot, Tensor], None]
) -> Iterator[None]:
    """Shows the cotangents of some spots in the passes of an engine inside of a block."""
    handles = []
    try:
        for spot in spots:
            hook = partial(_show, spot, observe)
            handles.append(survey.nodes[spot.node].register_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _show(
    spot: Spot,
    observe: Callable[[Spot, Tensor], None],
    inputs: tuple[Tensor | None, ...],
    results: tuple[Tensor | None, ...],
) -> None:
    """A hook on the node of a spot."""
    current = running_pass()
    if current is None or current.is_blocked:
        return  # only passes past the taps show where the samples of the losses are
    cotangent = (inputs if spot.is_input else results)[spot.position]
    if cotangent is not None and cotangent.numel():
        observe(spot, in_dense(cotangent))


class _Way(NamedTuple):
    """How a node leads to another that has taps behind it."""

    arrival: Spot
    """The input of the node."""
    target: Spot
    """The result of the other node, whose cotangent is the sum of all that arrives there."""
    moves_nothing: bool
    """Whether each element has its cotangent from the element in its place."""


class Prover:
    """Proves what the places of samples depend on, from what a search by zeros shows.

    Args:
        survey: The graph.

    Attributes:
        spots: What to look at in the search.
    """

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self._ways = _ways_to_taps(survey)
        self.spots: list[Spot] = []
        for number, ways in self._ways.items():
            self.spots += _results(survey, survey.nodes[number])
            self.spots += [way.arrival for way in ways if not way.moves_nothing]

    def proof(self, fitting: Mapping[Spot, set[int] | None]) -> Proof:
        """What follows from the dimensions in which samples may lie.

        Args:
            fitting: Those of each spot that the search has reached; ``None`` if it was zero.
        """
        constants: dict[Constant, None] = {}
        is_for_one_call = False
        for spot, dims in fitting.items():
            if not spot.is_input and dims is not None:
                decided_by = self._deciding(spot, dims, fitting)
                constants.update(dict.fromkeys(decided_by or ()))
                is_for_one_call |= decided_by is None
        if is_for_one_call:
            return Proof((), (), is_for_one_call)
        silent = sorted(spot for spot, dims in fitting.items() if dims is None)
        return Proof(tuple(constants), tuple(silent), is_for_one_call)

    def _deciding(
        self, spot: Spot, dims: set[int], fitting: Mapping[Spot, set[int] | None]
    ) -> list[Constant] | None:
        """The constants by which a node moves samples of a result, or ``None`` if more decides."""
        node = self.survey.nodes[spot.node]
        saves_values = bool(kind_of_node(node.__class__).tensors)
        constants: list[Constant] = []
        for arrival, target, stays in self._ways[spot.node]:
            arrived = dims if stays else fitting.get(arrival)
            total = fitting.get(target)
            if not dims or (arrived is not None and total is not None and arrived != total):
                return None
            if stays:
                continue
            is_carried = dims <= carried(Edge(node, arrival.position, spot.shape, target.shape))
            # Where more dimensions fit, values may have hidden all that tells them apart.
            is_clear = arrived is None or len(arrived) <= len(dims)
            if is_carried and (is_clear or not saves_values):
                continue
            saved = self._saved(spot.node, dims if is_clear else set(), target.shape)
            if saved is None:
                return None
            constants += saved
        return constants

    def _saved(self, number: int, dims: set[int], given: Shape) -> list[Constant] | None:
        """What a node saved, or ``None`` if it is not constant, or not to be compared."""
        node = self.survey.nodes[number]
        fields = kind_of_node(node.__class__).tensors
        if not fields or any(is_packed(getattr(node, f"_raw{field}")) for field in fields):
            return None
        constants = []
        for field in fields:
            found = getattr(node, field)
            if isinstance(found, Tensor):
                constants.append(Constant(number, field, None))
            elif found is not None:
                entries = [Constant(number, field, i) for i, x in enumerate(found) if x is not None]
                constants += entries[: _count_of_deciding(found, dims, given)]
        values = [constant.value(self.survey) for constant in constants]
        return constants if all(_can_be_compared(x) for x in values) else None


def _ways_to_taps(survey: Survey) -> dict[int, list[_Way]]:
    """For each tap, and each node that leads to one, its ways to other such nodes."""
    reaching = nodes_leading_to([survey.nodes[x] for x in survey.uses.values()], survey.nodes)
    return {
        survey.numbers[node]: [
            _way(survey, node, position, _results(survey, following)[result])
            for position, (following, result) in enumerate(node.next_functions)
            if following in reaching
        ]
        for node in survey.nodes
        if node in reaching
    }


def _results(survey: Survey, node: Any) -> list[Spot]:
    """The results of a node."""
    shapes = [tuple(metadata.shape) for metadata in node._input_metadata]
    number = survey.numbers[node]
    return [Spot(number, position, False, shape) for position, shape in enumerate(shapes)]


def _way(survey: Survey, node: Any, position: int, target: Spot) -> _Way:
    """The way from an input of a node to another node."""
    is_alike = {spot.shape for spot in _results(survey, node)} == {target.shape}
    edge = Edge(node, position, target.shape, target.shape)
    stays = is_alike and (is_any_tap(node) or moves_nothing(edge))
    return _Way(Spot(survey.numbers[node], position, True, target.shape), target, stays)


def _count_of_deciding(indices: tuple[Tensor | None, ...], dims: set[int], given: Shape) -> int:
    """How many of the entries of an index decide: with ``x[arange, y]``, only the first."""
    present = [x for x in indices if x is not None]
    first = indices[0]
    runs = first is not None and _is_in_order(first, given[0])
    return 1 if runs and dims == {0} and all(x.dim() == 1 for x in present) else len(present)


def _is_in_order(index: Tensor, size: int) -> bool:
    """Whether an index runs through a dimension from its first place to its last."""
    if index.dim() != 1 or len(index) != size or index.is_floating_point():
        return False
    return torch.equal(index.long(), torch.arange(size, device=index.device))


def _can_be_compared(value: Tensor) -> bool:
    """Whether it is worth to compare a tensor with that of an earlier step."""
    is_plain = value.layout == torch.strided and not value.is_nested
    return is_plain and not value.requires_grad and value.numel() <= _LARGEST
