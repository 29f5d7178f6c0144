"""Routes: where samples go that values take to irregular places, as tokens to experts.

A search by zeros finds such places, and they are others in the next step: the tokens that a router
sends to an expert, the nodes of graphs of other sizes, the words that are masked. But the nodes
that move them have saved to where. So the owners of irregular places are computed at each call,
from the regular places around them, by integers that are small beside what they are about: node by
node, as a backward pass would go (see :mod:`.moves`). No pass over the model is needed for that.
Where owners arrive at regular places, they are compared with the samples there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autogram._blocks import Folded
from autogram._capture.autograd.graph import shown_by, use_of
from autogram._capture.samples.owners import NONE, Owners, are_none
from autogram._capture.samples.proofs.carrying import Crossing
from autogram._capture.samples.proofs.moves import (
    SEVERAL,
    Passage,
    keeps_first,
    owners_of_input,
    owners_of_sum,
)
from autogram._capture.samples.proofs.spots import (
    Layouts,
    Onward,
    Regular,
    Spot,
    Ways,
    results_of_node,
)
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use


@dataclass(frozen=True)
class Routes:
    """How samples get to irregular places, for graphs of one structure; by default, none does."""

    # Regular ones, in results of nodes at either end.
    places: Mapping[Spot, Folded] = field(default_factory=dict)
    # Each behind those that it needs, and whether places along the first dimension stay where there
    # are as many of them.
    hops: Mapping[Onward, bool] = field(default_factory=dict)
    taps: frozenset[int] = frozenset()  # on irregular results, by number
    # For each node of the survey, 1 if hops go through it, so that what it saved may be of any
    # sizes, and 2 if its results may be so, too: they are irregular, or lead to no tap.
    free: bytes = b""

    def owners(self, survey: Survey) -> tuple[dict[int, Tensor], list[Tensor]] | None:
        """The owners of the results of taps in a call, as in :mod:`.moves`, by the taps' numbers.

        And comparisons of those of regular places: booleans, none of which may be true. ``None``
        where a node moves samples in an unknown way at the sizes of this call.
        """
        found: dict[Spot, Tensor] = {}
        doubts: list[Tensor] = []
        for spot, layout in self.places.items():
            of = survey.nodes[spot.node]._input_metadata[spot.position]
            size = layout.before * layout.batch * layout.after
            if len(of.shape) != len(spot.shape) or of.shape[0] != size:
                return None
            found[spot] = torch.arange(size, device=of.device) // layout.after % layout.batch
        for hop, stays in self.hops.items():
            arrived = tuple(map(found.get, hop.results))
            if all(x is None for x in arrived):
                continue
            target, owners = hop.target, arrived[0]
            given = tuple(survey.nodes[target.node]._input_metadata[target.position].shape)
            if len(given) != len(target.shape):
                return None
            if not stays or owners is None or owners.shape != given[:1]:
                node = survey.nodes[hop.arrival.node]
                results = tuple([tuple(x.shape) for x in node._input_metadata])
                owners = owners_of_input(
                    Passage(node, hop.arrival.position, given, results, arrived, doubts)
                )
                if owners is None:
                    return None
            before = found.get(target)
            if before is not None:
                owners = owners_of_sum([before, owners])
            if target not in self.places:
                found[target] = owners
            elif owners is not before:
                doubts.append((owners == SEVERAL).any())
        return {x.node: own for x, own in found.items() if x.node in self.taps}, doubts

    def without_told(self, spots: Iterable[Spot]) -> list[Spot]:
        """Those of some spots whose places have owners that are not known."""
        told = {spot for hop in self.hops for spot in (hop.arrival, hop.target)}
        return [x for x in spots if x not in told or x in self.places]

    def others(self, survey: Survey, found: Layouts) -> Layouts:
        """The layouts of all uses in regular places."""
        numbers = survey.uses  # but for uses that the survey does not show
        return {use: of for use, of in found.items() if numbers.get(use) not in self.taps}


NO_ROUTES = Routes()


def find_routes(survey: Survey, ways: Ways, regular: Regular, seen: Mapping[Use, Owners]) -> Routes:
    """The routes to all results in which a search has found samples in irregular places.

    No routes where a node in front of one moves samples in an unknown way.
    """
    irregular = {spot for spot, of in regular.items() if of == () and not spot.is_input}
    if not irregular or survey.may_hide_taps:
        return NO_ROUTES
    for number in ways:  # also what had no cotangent, or too little to tell its places
        if any(spot in irregular for spot in results_of_node(survey, number)):
            targets = [way.target for way in ways[number]]
            irregular.update([spot for spot in targets if len(regular.get(spot) or ()) != 1])
    places: dict[Spot, Folded] = {}
    hops: dict[Onward, bool] = {}
    nodes: set[int] = set()
    for number in ways:
        results = results_of_node(survey, number)
        around = dict.fromkeys([*results, *[way.target for way in ways[number]]])
        if irregular.isdisjoint(around):
            continue
        node = survey.nodes[number]
        is_of_several = number in survey.uses.values() and len(results) > 1
        if use_of(node) is None and (shown_by(node) or is_of_several):
            return NO_ROUTES
        nodes.add(number)
        for spot in around:
            layouts = regular.get(spot)
            if layouts and spot not in irregular:
                if len(layouts) > 1 or layouts[0].dim:
                    return NO_ROUTES
                places[spot] = layouts[0]
        for way in ways[number]:
            if way.target in irregular or way.target in places:
                edge = Crossing(node, way.arrival.position, results[0].shape, way.target.shape)
                hops[way] = len(results) == 1 and keeps_first(edge)
    own = {*survey.uses.values()}
    taps = frozenset(spot.node for spot in irregular if spot.node in own)
    free = bytearray([2 * (x not in ways) + (x in nodes) for x in range(len(survey.nodes))])
    for spot in irregular:
        free[spot.node] = 2
    if any(free[spot.node] == 2 for spot in places):
        return NO_ROUTES  # a node has both
    routes = Routes(places, hops, taps, bytes(free))
    return routes if _agree(routes, survey, seen) else NO_ROUTES


def _agree(routes: Routes, survey: Survey, seen: Mapping[Use, Owners]) -> bool:
    """Whether routes lead to where a search has seen the samples."""
    found = routes.owners(survey)
    if found is None or any(map(bool, found[1])):
        return False
    own = [(found[0].get(x), seen.get(use)) for use, x in survey.uses.items() if x in routes.taps]
    return all(_fits(*each) for each in own)


def _fits(owners: Tensor | None, seen: Owners | None) -> bool:
    """Whether owners are those of all places that have a cotangent.

    Layouts that fit would not do: they may give places without a cotangent to any sample.
    """
    if not seen or are_none(seen):
        return True
    if owners is None or (owners.dim() and 0 not in seen):
        return False
    places = seen[0] if owners.dim() else next(iter(seen.values()))
    return bool(((places == owners.cpu()) | (places == NONE)).all())
