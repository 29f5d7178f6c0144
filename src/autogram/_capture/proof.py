"""Proofs: which values decide where the samples lie, so that the rest of a step may change.

While samples are sought by zeros, every node of the graph is watched that could move them. Where
each such node carries the dimension in which samples lie (see :mod:`autogram._capture.carrying`),
no value can move a sample, and what was found holds for any step with the same graph. Where one
does not, the values that it saved decide: constants are compared at each call, and with anything
else, the samples are sought at each call.

Samples lie along one dimension of the losses, by definition. From node to node follows that the
only dimension that fits what is seen is the right one. Where several fit, all of them must be
carried. A node whose cotangent is zero shows nothing, and moves nothing as long as it is zero,
which is looked at in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from autogram._capture.answer import Answer
from autogram._capture.carrying import Shape, carried, is_in_order, is_packed, moves_nothing
from autogram._capture.survey import Survey, kind_of_node

# Elements of a constant that is compared at each call; a larger one is taken for one that changes.
_LARGEST = 2**22


class Spot(NamedTuple):
    """One result of a node that may move samples."""

    node: int
    """The number of the node in the survey."""
    place: int
    """The number of the result."""
    shape: Shape
    dims: tuple[int, ...]
    """The dimensions that matter: none where the node carries each of them."""


class Watch(NamedTuple):
    """A tensor that a node saved, whose values decide where samples go."""

    node: int
    field: str
    entry: int | None
    """Which of them, where the field holds several."""

    def value(self, survey: Survey) -> Tensor:
        """The tensor."""
        found = getattr(survey.nodes[self.node], self.field)
        tensor: Tensor = found if self.entry is None else found[self.entry]
        return tensor


@dataclass(frozen=True)
class Proof:
    """What the places of samples depend on, beside the graph.

    Attributes:
        watches: The constants that decide.
        movers: The operations in which other values decide.
        silent: The numbers of the nodes that had a cotangent of zero.
    """

    watches: tuple[Watch, ...]
    movers: frozenset[str]
    silent: tuple[int, ...]


class Silence:
    """Nodes whose cotangents were zero in the pass that was proven, watched in another pass.

    Args:
        survey: The graph.
        numbers: Those of the nodes.
    """

    def __init__(self, survey: Survey, numbers: Sequence[int]) -> None:
        self._nodes = [survey.nodes[number] for number in numbers]
        self._flags: list[Tensor] = []

    @property
    def is_broken(self) -> bool:
        """Whether one of them had another cotangent."""
        return Answer(self._flags).read()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches them in the passes inside of a block."""
        handles = [node.register_prehook(self._listen) for node in self._nodes]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _listen(self, cotangents: tuple[Tensor | None, ...]) -> None:
        """A hook on one of them."""
        self._flags += [(x != 0).any() for x in cotangents if x is not None]


class Spots:
    """The nodes of a graph that may move samples, watched during the passes of a search.

    Args:
        survey: The graph.
    """

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._inputs = _inputs_with_taps(survey)
        self._reached: set[Spot] = set()
        self._spots: dict[int, list[Spot]] = {}
        for number, inputs in self._inputs.items():
            found = _spots_of(survey, number, inputs)
            if found:
                self._spots[number] = found

    @contextmanager
    def shown_to(self, observe: Callable[[Spot, Tensor], None]) -> Iterator[None]:
        """Shows the cotangents of all spots in the passes inside of a block."""
        handles = []
        try:
            for number, spots in self._spots.items():
                show = _Show(spots, self._reached, observe)
                handles.append(self._survey.nodes[number].register_prehook(show))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def proof(self, fitting: dict[Spot, set[int]]) -> Proof:
        """What follows from the dimensions in which samples may lie.

        Args:
            fitting: Those of each spot that has a cotangent.
        """
        watches: dict[Watch, None] = {}
        movers: set[str] = set()
        for number, spots in self._spots.items():
            for spot in spots:
                dims = fitting.get(spot)
                if dims is None:
                    continue
                for place, given in self._inputs[number]:
                    if self._carries(spot, dims, place, given):
                        continue
                    decided_by = self._deciding(spot, dims, given)
                    watches.update(dict.fromkeys(decided_by or ()))
                    if decided_by is None:
                        movers.add(kind_of_node(self._survey.nodes[number].__class__).operation)
        seen = {spot.node for spot in fitting}
        silent = {spot.node for spot in self._reached} - seen
        return Proof(tuple(watches), frozenset(movers), tuple(sorted(silent)))

    def _carries(self, spot: Spot, dims: set[int], place: int, given: Shape) -> bool:
        """Whether no value can move samples from a result's dimensions to other places."""
        node = self._survey.nodes[spot.node]
        operation = kind_of_node(node.__class__).operation
        if not spot.dims or moves_nothing(operation, spot.shape, given):
            return True
        return bool(dims) and dims <= carried(operation, node, place, spot.shape, given)

    def _deciding(self, spot: Spot, dims: set[int], given: Shape) -> list[Watch] | None:
        """The constants by which a node moves samples, or ``None`` if anything else decides."""
        node = self._survey.nodes[spot.node]
        kind = kind_of_node(node.__class__)
        saved = [(x, getattr(node, f"_raw{x}")) for x in kind.tensors]
        if kind.is_function or not saved or any(is_packed(raw) for _, raw in saved):
            return None
        watches = []
        for field, _ in saved:
            found = getattr(node, field)
            if isinstance(found, Tensor):
                watches.append(Watch(spot.node, field, None))
            elif found is not None:
                entries = [Watch(spot.node, field, i) for i, x in enumerate(found) if x is not None]
                watches += entries[: _count_of_deciding(found, dims, given)]
        values = [watch.value(self._survey) for watch in watches]
        return watches if all(_can_be_compared(x) for x in values) else None


class _Show:
    """A hook on a node that shows the cotangents of its spots."""

    def __init__(
        self, spots: list[Spot], reached: set[Spot], observe: Callable[[Spot, Tensor], None]
    ) -> None:
        self._spots = spots
        self._reached = reached
        self._observe = observe

    def __call__(self, cotangents: tuple[Tensor | None, ...]) -> None:
        for spot in self._spots:
            cotangent = cotangents[spot.place]
            if cotangent is not None and cotangent.numel():
                self._reached.add(spot)
                self._observe(spot, cotangent)


def _inputs_with_taps(survey: Survey) -> dict[int, list[tuple[int, Shape]]]:
    """For each node with taps behind it, by which of its inputs, and of which shapes these are."""
    numbers = {node: number for number, node in enumerate(survey.nodes)}
    followers: dict[int, list[int]] = {}
    for number, node in enumerate(survey.nodes):
        for following, _ in node.next_functions:
            if following is not None:
                followers.setdefault(numbers[following], []).append(number)
    pending = list(survey.uses.values())
    reaching = set(pending)
    while pending:
        for number in followers.get(pending.pop(), ()):
            if number not in reaching:
                reaching.add(number)
                pending.append(number)
    return {
        number: [
            (place, tuple(following._input_metadata[entry].shape))
            for place, (following, entry) in enumerate(survey.nodes[number].next_functions)
            if following is not None and numbers[following] in reaching
        ]
        for number in sorted(reaching)
    }


def _spots_of(survey: Survey, number: int, inputs: list[tuple[int, Shape]]) -> list[Spot]:
    """The spots of one node, if it could move samples to the inputs that have taps behind them."""
    node = survey.nodes[number]
    operation = kind_of_node(node.__class__).operation
    if getattr(node, "use", None) is not None:
        return []  # a tap, of any engine
    spots = []
    for place, metadata in enumerate(node._input_metadata):
        shape = tuple(metadata.shape)
        dims = tuple(range(len(shape)))
        carries = [carried(operation, node, x, shape, given) >= set(dims) for x, given in inputs]
        moves = [not moves_nothing(operation, shape, given) for _, given in inputs]
        if any(moves):
            spots.append(Spot(number, place, shape, () if dims and all(carries) else dims))
    return spots


def _count_of_deciding(indices: tuple[Tensor | None, ...], dims: set[int], given: Shape) -> int:
    """How many of the entries of an index decide: with ``x[arange, y]``, only the first."""
    present = [x for x in indices if x is not None]
    first = indices[0]
    runs = first is not None and is_in_order(first, given[0])
    return 1 if runs and dims == {0} and all(x.dim() == 1 for x in present) else len(present)


def _can_be_compared(value: Tensor) -> bool:
    """Whether it is worth to compare a tensor with that of an earlier step."""
    is_plain = value.layout == torch.strided and not value.is_nested
    return is_plain and not value.requires_grad and value.numel() <= _LARGEST
