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

Along a dimension with several places for each sample, a node may also move them by a number, as
the start of a slice: it is carried out with a cotangent in all places before anything is
remembered, and the proof is for these sizes.

Where a node does not carry the dimension, the values that it saved decide. If they are constants,
they are compared at each call. If not, each call tries the node alone (see :mod:`.trials`) where
samples have regular places on both sides of it, computes irregular places where the nodes around
them tell of these (see :mod:`.routes`), and else searches for the samples. A cotangent that is
zero shows no owners, and moves nothing as long as it is zero, which is watched in each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._blocks import Folded
from autogram._capture.autograd.graph import VIEWS, calls_of, kind_of_node
from autogram._capture.autograd.slices import CHANGE
from autogram._capture.samples.owners import Owners
from autogram._capture.samples.proofs.carrying import (
    Crossing,
    Shape,
    carried,
    is_packed,
    runs_through,
)
from autogram._capture.samples.proofs.regular import may_shift
from autogram._capture.samples.proofs.routes import NO_ROUTES, Routes, find_routes
from autogram._capture.samples.proofs.spots import Layouts, Regular, Spot, Ways, results_of_node
from autogram._capture.samples.proofs.trials import Trial, can_try
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use

# Constants of at most this many elements are compared. Larger ones count as changing in each call.
_LARGEST = 2**22


class Constant(NamedTuple):
    """A tensor that a node saved, which requires no gradient, and whose values decide."""

    node: int  # its number in the survey
    field: str  # the attribute of the node that holds the tensor
    entry: int | None = None  # the index of the tensor, where the attribute holds several
    # Whether it has the numbers of all rows, in order: as long as it stays so, it moves none.
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
    """What the places of samples depend on, beside the graph."""

    constants: tuple[Constant, ...] = ()  # those that decide
    silent: tuple[Spot, ...] = ()  # those whose cotangent was zero, or that no pass has reached
    trials: tuple[Trial, ...] = ()  # of nodes that are tried in each call
    # Of nodes whose constants or numbers decide. It is not known to whom places without a cotangent
    # belong, so that these nodes are tried before anything is remembered.
    moving: tuple[Trial, ...] = ()
    routes: Routes = NO_ROUTES  # where values take samples to irregular places
    is_for_one_call: bool = False  # as values decide that are neither constants nor seen by trials
    dims: Dims = ()  # where samples were found: of samples in others, a proof says nothing

    def is_about(self, survey: Survey, found: Layouts) -> bool:
        """Whether samples of uses on no route lie in dimensions in which they were found."""
        dims = dims_of(survey, self.routes.others(survey, found))
        return all(now <= then for now, then in zip(dims, self.dims, strict=True))

    @property
    def is_for_sizes(self) -> bool:
        """Whether the proof is for one graph, of the same sizes."""
        trials = (*self.trials, *self.moving)
        return bool(self.routes.hops) or any(trial.is_for_sizes for trial in trials)


@dataclass
class Prover:
    """Proves what the places of samples depend on, from the layouts that a search has found."""

    survey: Survey
    ways: Ways
    regular: Regular
    uses: Layouts
    seen: Mapping[Use, Owners]
    """The owners of the places of uses, as the search has seen them."""

    def proof(self) -> Proof:
        """What the places of samples depend on, beside the graph."""
        regular = self.regular
        constants: dict[Constant, None] = {}
        trials: list[Trial] = []
        moving: list[Trial] = []
        for number in sorted({spot.node for spot in regular}):
            call = self._call(number)
            if call is not None and not self._is_carried(call, number):
                return Proof(is_for_one_call=True)
        routes = find_routes(self.survey, self.ways, regular, self.seen)
        for spot, layouts in regular.items():
            if routes.hops and routes.free[spot.node]:
                continue
            if not spot.is_input and layouts is not None:
                decided_by = self._deciding(spot, layouts)
                constants.update(dict.fromkeys(decided_by or ()))
                keeps_order = decided_by is not None and all(x.is_in_order for x in decided_by)
                if keeps_order and not may_shift(self.survey, spot, self.ways[spot.node], regular):
                    continue
                if (trial := self._trial(spot)) is None:
                    return Proof(is_for_one_call=True)
                (trials if decided_by is None else moving).append(trial)
        silent = [spot for spot, layouts in regular.items() if layouts is None]
        # And inputs that no pass has reached, of nodes that may return other cotangents each time.
        others = [way for trial in trials for way in self.ways[trial.node] if not way.moves_nothing]
        silent += [way.arrival for way in others if way.arrival not in regular]
        of_values = tuple(constants), tuple(routes.without_told(silent))
        tried = tuple(trials), tuple(moving)
        dims = dims_of(self.survey, routes.others(self.survey, self.uses))
        return Proof(*of_values, *tried, routes, dims=dims)

    def _trial(self, spot: Spot) -> Trial | None:
        """How to try a node, if one layout fits its result and one fits each of its inputs."""
        regular = self.regular
        place = _place(regular[spot])
        inputs: list[tuple[int, Folded]] = []
        for _, arrival, target, stays in self.ways[spot.node]:
            arrived, total = regular.get(arrival), regular.get(target)
            if stays or arrived is None:
                continue
            given = _place(arrived)
            if given is None or (total is not None and _place(total) != given):
                return None
            inputs.append((arrival.position, given))
        node = self.survey.nodes[spot.node]
        if place is None or self.survey.may_hide_taps or not can_try(node):
            return None  # what was changed in place may be shown by a tap inside of the node
        return Trial(spot.node, place, tuple(inputs))

    def _call(self, number: int) -> Any | None:
        """What this engine, or else another one, is shown of a call of a compiled part."""
        calls = calls_of(self.survey.nodes[number])
        own = (x for x in calls if x.recording.channel is self.survey.channel)
        return next(own, calls[0] if calls else None)

    def _is_carried(self, call: Any, number: int) -> bool:
        """Whether a compiled part takes samples where they were found, whatever its values are."""
        node, regular, uses = self.survey.nodes[number], self.regular, self.uses
        given = [regular.get(spot) for spot in results_of_node(self.survey, number)]
        if any(layouts is not None and len(layouts) != 1 for layouts in given):
            return False
        found = call.carried(node, [None if x is None else x[0] for x in given])
        if found is None:
            return False
        own, inputs = found
        if any(place not in uses[use] for use, place in own.items() if uses.get(use)):
            return False
        for way in self.ways[number]:
            arrived, total = regular.get(way.arrival), regular.get(way.target)
            if arrived is not None and (inputs[way.arrival.position] not in arrived):
                return False
            if arrived is not None and total is not None and arrived != total:
                return False
        return True

    def _deciding(self, spot: Spot, layouts: tuple[Folded, ...]) -> list[Constant] | None:
        """The constants by which a node moves samples of a result, or ``None`` if more decides."""
        dims = {layout.dim for layout in layouts}
        if self._call(spot.node) is not None:
            return []
        node = self.survey.nodes[spot.node]
        kind = kind_of_node(node.__class__)
        saves_values = bool(kind.tensors) or kind.operation == CHANGE  # which does not tell
        constants: list[Constant] = []
        for _, arrival, target, stays in self.ways[spot.node]:
            arrived = dims if stays else _dims(self.regular.get(arrival))
            total = _dims(self.regular.get(target))
            if not dims or (arrived is not None and total is not None and arrived != total):
                return None
            if stays:
                continue
            if kind.operation in VIEWS:
                is_carried = all(x.reshaped(spot.shape, target.shape) for x in layouts)
            else:
                edge = Crossing(node, arrival.position, spot.shape, target.shape)
                is_carried = dims <= carried(edge)
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
                if dims == {0} and runs_through(found, given[0]):
                    constants.append(Constant(number, field, 0, is_in_order=True))  # decides alone
                    continue
                entries = [Constant(number, field, i) for i, x in enumerate(found) if x is not None]
                constants += entries
        for value in (constant.value(self.survey) for constant in constants):
            is_plain = value.layout == torch.strided and not value.is_nested
            if not is_plain or value.requires_grad or value.numel() > _LARGEST:
                return None
        return constants


def dims_of(survey: Survey, found: Layouts) -> Dims:
    """The dimensions in which regular layouts have samples, for each use."""
    return tuple(
        [
            frozenset(x.dim for x in found.get(use, ()) if isinstance(x, Folded))
            for use in survey.uses
        ]
    )


def _place(layouts: tuple[Folded, ...] | None) -> Folded | None:
    """The only layout that fits, if there is one."""
    return layouts[0] if layouts and len(layouts) == 1 else None


def _dims(layouts: tuple[Folded, ...] | None) -> set[int] | None:
    """The dimensions of some layouts, if there is a cotangent."""
    return None if layouts is None else {layout.dim for layout in layouts}
