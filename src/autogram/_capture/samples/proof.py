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
at each call. With anything else, there is no proof, and the samples are sought at each call. A
cotangent that is zero shows nothing, and moves nothing as long as it is zero, which is looked at in
each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from autogram._capture.autograd.graph import in_dense, is_any_tap, nodes_leading_to
from autogram._capture.autograd.passes import running_pass
from autogram._capture.samples.answer import Answer
from autogram._capture.samples.carrying import Shape, carried, is_in_order, is_packed, moves_nothing
from autogram._capture.samples.survey import NodeKind, Survey, kind_of_node

# Elements of a constant that is compared at each call; a larger one is taken for one that changes.
_LARGEST = 2**22


class Spot(NamedTuple):
    """A place in the graph where a pass shows a cotangent."""

    node: int
    """The number of the node in the survey."""
    place: int
    """The number of a result of the node, or of an input."""
    is_input: bool
    shape: Shape

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions in which samples may lie."""
        return tuple(range(len(self.shape)))


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
        movers: The kinds of nodes in which other values decide.
        silent: The places that had a cotangent of zero.
    """

    watches: tuple[Watch, ...]
    movers: frozenset[str]
    silent: tuple[Spot, ...]


class Silence:
    """Spots whose cotangents were zero in the pass that was proven, watched in another pass.

    Args:
        survey: The graph. Sizes may be others than those that were proven.
        spots: The spots.
    """

    def __init__(self, survey: Survey, spots: Sequence[Spot]) -> None:
        self._survey = survey
        self._spots = spots
        self._flags: list[Tensor] = []

    @property
    def is_broken(self) -> bool:
        """Whether one of them had another cotangent."""
        return Answer(self._flags).read()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches them in the passes inside of a block."""
        handles = []
        for spot in self._spots:
            node, listen = self._survey.nodes[spot.node], partial(self._listen, spot.place)
            handles.append(
                node.register_hook(lambda inputs, _, listen=listen: listen(inputs))
                if spot.is_input
                else node.register_prehook(listen)
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _listen(self, place: int, cotangents: tuple[Tensor | None, ...]) -> None:
        """A hook on the node of one of them."""
        cotangent = cotangents[place] if _is_wanted() else None
        if cotangent is not None:
            self._flags.append((in_dense(cotangent) != 0).any())


class Spots:
    """The nodes of a graph that a pass to its taps goes through, watched during a search.

    Args:
        survey: The graph.
    """

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._edges = _edges_to_taps(survey)
        self._reached: set[Spot] = set()

    @contextmanager
    def shown_to(self, observe: Callable[[Spot, Tensor], None]) -> Iterator[None]:
        """Shows the cotangents of all spots in the passes inside of a block."""
        handles = []
        try:
            for number, edges in self._edges.items():
                show = _Show(number, edges, self._reached, observe)
                handles.append(self._survey.nodes[number].register_hook(show))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def proof(self, fitting: Mapping[Spot, set[int]]) -> Proof:
        """What follows from the dimensions in which samples may lie.

        Args:
            fitting: Those of each spot that has a cotangent.
        """
        watches: dict[Watch, None] = {}
        movers: set[str] = set()
        for spot, dims in fitting.items():
            if spot.is_input:
                continue
            decided_by = self._deciding(spot, dims, fitting)
            watches.update(dict.fromkeys(decided_by or ()))
            if decided_by is None:
                movers.add(self._kind(spot.node).name)
        silent = self._reached.difference(fitting)
        return Proof(tuple(watches), frozenset(movers), tuple(sorted(silent)))

    def _deciding(
        self, spot: Spot, dims: set[int], fitting: Mapping[Spot, set[int]]
    ) -> list[Watch] | None:
        """The constants by which a node moves samples of a result, or ``None`` if more decides."""
        node, kind = self._survey.nodes[spot.node], self._kind(spot.node)
        operation, saves_values = kind.operation, bool(kind.tensors)
        watches: list[Watch] = []
        for edge in self._edges[spot.node]:
            arrived = dims if edge.moves_nothing else fitting.get(edge.spot(spot.node))
            total = fitting.get(edge.target)
            if not dims or (arrived is not None and total is not None and arrived != total):
                return None
            if edge.moves_nothing:
                continue
            is_carried = dims <= carried(operation, node, edge.place, spot.shape, edge.target.shape)
            # Where more dimensions fit, values may have hidden all that tells them apart.
            is_clear = arrived is None or len(arrived) <= len(dims)
            if is_carried and (is_clear or not saves_values):
                continue
            constants = self._constants(spot.node, dims if is_clear else set(), edge.target.shape)
            if constants is None:
                return None
            watches += constants
        return watches

    def _constants(self, number: int, dims: set[int], given: Shape) -> list[Watch] | None:
        """What a node saved, or ``None`` if it is not constant, or not to be compared."""
        node, kind = self._survey.nodes[number], self._kind(number)
        saved = [(x, getattr(node, f"_raw{x}")) for x in kind.tensors]
        if kind.is_function or not saved or any(is_packed(raw) for _, raw in saved):
            return None
        watches = []
        for field, _ in saved:
            found = getattr(node, field)
            if isinstance(found, Tensor):
                watches.append(Watch(number, field, None))
            elif found is not None:
                entries = [Watch(number, field, i) for i, x in enumerate(found) if x is not None]
                watches += entries[: _count_of_deciding(found, dims, given)]
        values = [watch.value(self._survey) for watch in watches]
        return watches if all(_can_be_compared(x) for x in values) else None

    def _kind(self, number: int) -> NodeKind:
        """The kind of a node."""
        return kind_of_node(self._survey.nodes[number].__class__)


class _Edge(NamedTuple):
    """How a node leads to another that has taps behind it."""

    place: int
    """The number of the input."""
    target: Spot
    """The result of the other node."""
    moves_nothing: bool
    """Whether each element has its cotangent from the element in its place."""

    def spot(self, number: int) -> Spot:
        """What arrives by this way, from a node of some number."""
        return Spot(number, self.place, True, self.target.shape)


class _Show:
    """A hook on a node that shows its cotangents."""

    def __init__(
        self,
        number: int,
        edges: Sequence[_Edge],
        reached: set[Spot],
        observe: Callable[[Spot, Tensor], None],
    ) -> None:
        self._number = number
        self._edges = edges
        self._reached = reached
        self._observe = observe

    def __call__(
        self, inputs: tuple[Tensor | None, ...], results: tuple[Tensor | None, ...]
    ) -> None:
        if not _is_wanted():
            return
        for place, cotangent in enumerate(results):
            self._show(Spot(self._number, place, False, _shape(cotangent)), cotangent)
        for edge in self._edges:
            if not edge.moves_nothing:
                self._show(edge.spot(self._number), inputs[edge.place])

    def _show(self, spot: Spot, cotangent: Tensor | None) -> None:
        """Shows one of them, if there is any."""
        if cotangent is not None and cotangent.numel():
            self._reached.add(spot)
            self._observe(spot, cotangent)


def _shape(cotangent: Tensor | None) -> Shape:
    """The shape of a cotangent, if there is one."""
    return () if cotangent is None else tuple(cotangent.shape)


def _is_wanted() -> bool:
    """Whether a pass past the taps runs: no other shows where the samples of the losses are."""
    current = running_pass()
    return current is not None and not current.is_blocked


def _edges_to_taps(survey: Survey) -> dict[int, list[_Edge]]:
    """For each tap, and each node that leads to one, its edges to other such nodes."""
    numbers = {node: number for number, node in enumerate(survey.nodes)}
    reaching = nodes_leading_to([survey.nodes[x] for x in survey.uses.values()], survey.nodes)
    return {
        number: [
            _edge(survey, number, place, numbers[following], result)
            for place, (following, result) in enumerate(node.next_functions)
            if following in reaching
        ]
        for number, node in enumerate(survey.nodes)
        if node in reaching
    }


def _edge(survey: Survey, number: int, place: int, following: int, result: int) -> _Edge:
    """The way from a node to another."""
    node, other = survey.nodes[number], survey.nodes[following]
    given = tuple(other._input_metadata[result].shape)
    shapes = {tuple(metadata.shape) for metadata in node._input_metadata}
    stays = shapes == {given} and (
        is_any_tap(node) or moves_nothing(kind_of_node(node.__class__).operation, given, given)
    )
    return _Edge(place, Spot(following, result, False, given), stays)


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
