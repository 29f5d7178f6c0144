"""Proofs: which values decide where the samples lie. Other values may change from step to step.

In a search by zeros, the engine looks at the cotangents of all nodes that a pass goes
through. By definition, the samples lie along one dimension of the losses. A proof goes from there
to the taps, node by node. It holds if

- in the result of each node, samples lie in regular places along some dimension. Where several
  dimensions fit the cotangents, each condition must hold for all of them;
- each node carries that dimension to its inputs (see :mod:`.carrying`), so that
  no value can move a sample;
- the parts that add up to a cotangent have their samples in the same dimension as their sum;
- no more dimensions fit the cotangent of an input than that of the result, since values such as a
  diagonal of ones can make a dimension fit by accident.

Where a node does not carry the dimension, the values that it saved decide. If they are constants,
they are compared at each call; if not, each call searches for the samples. A cotangent that is
zero shows no owners, and moves nothing as long as it is zero, which is watched in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._blocks import Folded, Placement
from autogram._capture.autograd.graph import (
    in_dense,
    kind_of_node,
    nodes_leading_to,
    shown_by,
    use_of,
)
from autogram._capture.autograd.passes import running_pass
from autogram._capture.autograd.slices import CHANGE
from autogram._capture.samples.carrying import (
    VIEWS,
    Edge,
    Shape,
    carried,
    is_packed,
    moves_nothing,
    stays_regular,
)
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use

# Constants of at most this many elements are compared. Larger ones count as changing in each call.
_LARGEST = 2**22


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


class Constant(NamedTuple):
    """A tensor that a node saved, which requires no gradient, and whose values decide.

    Attributes:
        node: The number of the node in the survey.
        field: The attribute of the node that holds the tensor.
        entry: The index of the tensor, where the attribute holds several.
        is_in_order: Whether it has the numbers of all rows, in order, so that no row is moved as
            long as it stays what it is.
    """

    node: int
    field: str
    entry: int | None = None
    is_in_order: bool = False

    def value(self, survey: Survey) -> Tensor:
        """The tensor, in a graph with an equal survey."""
        found = getattr(survey.nodes[self.node], self.field)
        tensor: Tensor = found if self.entry is None else found[self.entry]
        return tensor


# Those in which the samples of each use may lie, in the order of the survey.
Dims = tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Proof:
    """What the places of samples depend on, beside the graph.

    Attributes:
        constants: The constants that decide.
        silent: The spots whose cotangent was zero.
        is_for_one_call: Whether values decide that are no constants.
        dims: Where samples were found. Of samples in other dimensions, a proof says nothing.
    """

    constants: tuple[Constant, ...] = ()
    silent: tuple[Spot, ...] = ()
    is_for_one_call: bool = False
    dims: Dims = ()

    def is_about(self, dims: Dims) -> bool:
        """Whether samples that lie in some dimensions of the uses are where they were found."""
        return all(now <= then for now, then in zip(dims, self.dims, strict=True))


@contextmanager
def shown(
    survey: Survey, spots: Iterable[Spot], observe: Callable[[Spot, Tensor], None]
) -> Iterator[None]:
    """Shows the cotangents of some spots in the passes of an engine inside of a block."""

    def show(spot: Spot, *cotangents: tuple[Tensor | None, ...]) -> None:
        current = running_pass()
        if current is None or current.is_blocked:
            return  # only passes from the losses to the taps show where samples are
        cotangent = cotangents[not spot.is_input][spot.position]
        if cotangent is not None and cotangent.numel():
            current.tell(partial(observe, spot), in_dense(cotangent))

    with ExitStack() as stack:
        for spot in spots:
            handle = survey.nodes[spot.node].register_hook(partial(show, spot))
            stack.callback(handle.remove)
        yield


class _Way(NamedTuple):
    """How a node leads to another that has taps behind it.

    Attributes:
        arrival: The input of the node.
        target: The result of the other node, whose cotangent is the sum of all that arrive there.
        moves_nothing: As :func:`.carrying.moves_nothing` says of the node.
    """

    arrival: Spot
    target: Spot
    moves_nothing: bool


class Prover:
    """Proves what the places of samples depend on, from what a search by zeros shows of spots."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.spots: list[Spot] = []
        self._ways: dict[int, list[_Way]] = {}  # of each tap, and each node that leads to one
        reaching = nodes_leading_to([survey.nodes[x] for x in survey.uses.values()], survey.nodes)
        for number, node in enumerate(survey.nodes):
            if node in reaching:
                ways = self._ways[number] = [
                    self._way(node, position, self._results(following)[result])
                    for position, (following, result) in enumerate(node.next_functions)
                    if following in reaching
                ]
                self.spots += self._results(node)
                self.spots += [way.arrival for way in ways if not way.moves_nothing]

    def proof(
        self,
        regular: Mapping[Spot, tuple[Folded, ...] | None],
        uses: Mapping[Use, tuple[Placement, ...]],
    ) -> Proof:
        """What the places of samples depend on.

        Args:
            regular: The layouts that fit each spot that was reached, or ``None`` if it was zero.
            uses: Those that fit the uses.
        """
        fitting = {s: None if of is None else {x.dim for x in of} for s, of in regular.items()}
        constants: dict[Constant, None] = {}
        for number in sorted({spot.node for spot in fitting}):
            call = self._call(number)
            if call is not None and not self._is_carried(call, number, regular, uses):
                return Proof(is_for_one_call=True)
        for spot, layouts in regular.items():
            if not spot.is_input and layouts is not None:
                decided_by = self._deciding(spot, layouts, fitting)
                if decided_by is None:
                    return Proof(is_for_one_call=True)
                constants.update(dict.fromkeys(decided_by))
        silent = tuple(spot for spot, dims in fitting.items() if dims is None)
        return Proof(tuple(constants), silent, dims=dims_of(self.survey, uses))

    def _call(self, number: int) -> Any | None:
        """What this engine, or else another one, is shown of a call of a compiled part."""
        node = self.survey.nodes[number]
        calls = () if use_of(node) is not None else shown_by(node)
        own = (x for x in calls if x.recording.channel is self.survey.channel)
        return next(own, calls[0] if calls else None)

    def _is_carried(
        self,
        call: Any,
        number: int,
        regular: Mapping[Spot, tuple[Folded, ...] | None],
        uses: Mapping[Use, tuple[Placement, ...]],
    ) -> bool:
        """Whether a compiled part takes samples where they were found, whatever its values are."""
        node = self.survey.nodes[number]
        given = [regular.get(spot) for spot in self._results(node)]
        if any(layouts is not None and len(layouts) != 1 for layouts in given):
            return False
        found = call.carried(node, [None if x is None else x[0] for x in given])
        if found is None:
            return False
        own, inputs = found
        if any(place not in uses[use] for use, place in own.items() if uses.get(use)):
            return False
        for way in self._ways[number]:
            arrived, total = regular.get(way.arrival), regular.get(way.target)
            if arrived is not None and (inputs[way.arrival.position] not in arrived):
                return False
            if arrived is not None and total is not None and arrived != total:
                return False
        return True

    def _results(self, node: Any) -> list[Spot]:
        """The results of a node."""
        shapes = [tuple(metadata.shape) for metadata in node._input_metadata]
        number = self.survey.numbers[node]
        return [Spot(number, position, False, shape) for position, shape in enumerate(shapes)]

    def _way(self, node: Any, position: int, target: Spot) -> _Way:
        """The way from an input of a node to another node."""
        edge = Edge(node, position, target.shape, target.shape)
        is_alike = {spot.shape for spot in self._results(node)} == {target.shape}
        stays = is_alike and (use_of(node) is not None or moves_nothing(edge))
        return _Way(Spot(self.survey.numbers[node], position, True, target.shape), target, stays)

    def _deciding(
        self,
        spot: Spot,
        layouts: tuple[Folded, ...],
        fitting: Mapping[Spot, set[int] | None],
    ) -> list[Constant] | None:
        """The constants by which a node moves samples of a result, or ``None`` if more decides."""
        dims = {layout.dim for layout in layouts}
        if self._call(spot.node) is not None:
            return []
        node = self.survey.nodes[spot.node]
        kind = kind_of_node(node.__class__)
        saves_values = bool(kind.tensors) or kind.operation == CHANGE  # which does not tell
        constants: list[Constant] = []
        for arrival, target, stays in self._ways[spot.node]:
            arrived = dims if stays else fitting.get(arrival)
            total = fitting.get(target)
            if not dims or (arrived is not None and total is not None and arrived != total):
                return None
            if stays:
                continue
            is_carried = dims <= carried(Edge(node, arrival.position, spot.shape, target.shape))
            if kind.operation in VIEWS:
                is_carried = all(stays_regular(x, spot.shape, target.shape) for x in layouts)
            # Where more dimensions fit the input, values may hide which of them is right.
            is_clear = arrived is None or len(arrived) <= len(dims)
            if is_carried and (is_clear or not saves_values):
                continue
            saved = self._saved(spot.node, dims if is_clear else set(), target.shape)
            if saved is None:
                return None
            constants += saved
        return constants

    def _saved(self, number: int, dims: set[int], given: Shape) -> list[Constant] | None:
        """The constants that a node saved, or ``None`` if other tensors are among them."""
        node = self.survey.nodes[number]
        fields = kind_of_node(node.__class__).tensors
        if not fields or any(is_packed(getattr(node, f"_raw{field}")) for field in fields):
            return None
        constants = []
        for field in fields:
            found = getattr(node, field)
            if isinstance(found, Tensor):
                constants.append(Constant(number, field))
            elif found is not None:
                if dims == {0} and _runs_through(found, given[0]):
                    constants.append(Constant(number, field, 0, is_in_order=True))  # decides alone
                    continue
                entries = [Constant(number, field, i) for i, x in enumerate(found) if x is not None]
                constants += entries
        for value in (constant.value(self.survey) for constant in constants):
            is_plain = value.layout == torch.strided and not value.is_nested
            if not is_plain or value.requires_grad or value.numel() > _LARGEST:
                return None
        return constants


def dims_of(survey: Survey, found: Mapping[Use, tuple[Placement, ...]]) -> Dims:
    """The dimensions in which regular layouts have samples, for each use."""
    return tuple(
        [
            frozenset(x.dim for x in found.get(use, ()) if isinstance(x, Folded))
            for use in survey.uses
        ]
    )


def _runs_through(indices: tuple[Tensor | None, ...], size: int) -> bool:
    """Whether the first of several indices keeps rows in order.

    As in ``x[arange, y]``, or in ``x[arange.unsqueeze(1), y]`` with several positions for each row.
    """
    first, *others = indices
    if first is None or first.is_floating_point() or first.dtype == torch.bool:
        return False
    # The rows stay in front if no other index has more dimensions, and a mask has its own.
    if first.numel() != size or first.shape[:1] != (size,):
        return False
    if any(x is not None and _rank(x) > first.dim() for x in others):
        return False
    return torch.equal(first.flatten().long(), torch.arange(size, device=first.device))


def _rank(index: Tensor) -> int:
    """How many dimensions an index has beside others, to which it is broadcast."""
    return 1 if index.dtype == torch.bool else index.dim()
