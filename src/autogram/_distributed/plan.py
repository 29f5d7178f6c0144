"""Plans: how the rows of each parameter meet those of other ranks, by cost, from shapes alone.

*Rows*: each rank gets a slice of the parameter, for the objectives of all ranks. *Ring*: each rank
gets the factors of half of the others, as one of two ranks is enough for the products of both. All
ranks know all shapes, and decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from autogram._blocks import Region, cost_of_products, cost_of_rows, is_of_lookup, overlap
from autogram._distributed.group import Link
from autogram._distributed.share import Operand, Piece, Share, cut

Way = Literal["rows", "ring"]

# Elements at once, of which many are on the way while others are contracted.
_BUCKET = 2**22

_ALIGNED = 16  # bytes, so that each tensor in a buffer can be viewed in its dtype

UNDER_WAY = 2  # buckets or packets that are exchanged while another is formed

Offsets = dict[tuple[int, int | None], tuple[slice, Operand, slice]]
"""Where tensors are in a buffer, and which of their samples.

By the slot, and the dimension along which it is cut into samples.
"""


@dataclass(frozen=True)
class Slice:
    """A range of the outermost dimension of a parameter in storage."""

    name: str
    start: int
    stop: int
    elements: int


@dataclass(frozen=True)
class Packet:
    """Factors of some parameters, or of some of the samples of one, that travel together."""

    names: tuple[str, ...]
    piece: int
    pieces: int  # how many ranges of samples there are
    turn: int  # of two opposite ranks, which one gets the other's factors

    def samples(self, count: int) -> slice:
        """The range of samples of a part that has some number of them."""
        step = -(-count // self.pieces)
        return slice(min(count, self.piece * step), min(count, (self.piece + 1) * step))

    def places_in(self, share: Share) -> tuple[Offsets, int]:
        """Where each tensor of a rank is in its buffer, and the size of the buffer in bytes."""
        places: Offsets = {}
        at = 0
        for name in self.names:
            for piece in share.pieces.get(name, ()):
                samples = self.samples(share.sizes[piece.part][1])
                for operand in piece.operands:
                    key = operand.slot, operand.sample
                    if key not in places:
                        size = cut(operand, samples)[1] * operand.dtype.itemsize
                        places[key] = slice(at, at + size), operand, samples
                        at += -(-size // _ALIGNED) * _ALIGNED
        return places, at


@dataclass(frozen=True)
class ExchangePlan:
    """How a step is exchanged."""

    ways: dict[str, Way]  # of each parameter that any rank has blocks of
    buckets: tuple[tuple[Slice, ...], ...]  # what is exchanged together as rows
    packets: tuple[Packet, ...]  # and as factors

    @property
    def messages(self) -> int:
        """How many messages a rank begins and ends one after the other."""
        return len(self.buckets) + len(self.packets)


def make_plan(shares: Sequence[Share], link: Link, way: Way | None = None) -> ExchangePlan:
    """The plan of a step: the cheaper of rows alone, and of factors beside rows; or by one way."""
    regions = dict(shares[0].parameters)
    names = [name for name in regions if any(name in share.pieces for share in shares)]
    if way is not None:
        return _plan(dict.fromkeys(names, way), regions, shares)
    costs = {name: costs_of(name, regions[name], shares, link) for name in names}
    alone: dict[str, Way] = dict.fromkeys(names, "rows")
    mixed = {name: min(of, key=of.__getitem__) for name, of in costs.items()}

    def cost(plan: ExchangePlan) -> float:
        of_ways = sum(costs[name][found] for name, found in plan.ways.items())
        return of_ways + link.call * plan.messages

    return min((_plan(ways, regions, shares) for ways in (alone, mixed)), key=cost)


def _plan(
    ways: dict[str, Way], regions: dict[str, Region], shares: Sequence[Share]
) -> ExchangePlan:
    """The plan in which each parameter goes its way."""
    limit = min(share.limit for share in shares)
    rows, ring = ([name for name in ways if ways[name] == way] for way in ("rows", "ring"))
    buckets = _buckets(rows, regions, shares, limit)
    sources = max(1, len(shares) // 2)  # from which each packet arrives
    most = limit // ((UNDER_WAY + 1) * sources)  # as so many packets are there at once
    packets = _packets(ring, shares, min(most, _BUCKET // sources), most)
    return ExchangePlan(ways, tuple(buckets), tuple(packets))


def costs_of(name: str, region: Region, shares: Sequence[Share], link: Link) -> dict[Way, float]:
    """What each way costs the slowest rank, in multiply-adds, without the beginning of messages."""
    world, m, n = len(shares), sum(share.m for share in shares), region.places
    largest = max(_bytes(share, name) for share in shares) / 4
    costs: dict[Way, float] = {"rows": 0.0, "ring": 0.0}
    for share in shares:
        pieces = share.pieces.get(name, ())
        forming = sum(_forming(piece) for piece in pieces)
        sent = share.m * n * (world - 1) / world
        pairs = sum(_pair(p, q, share, n) for p in pieces for q in pieces)
        own: dict[Way, float] = {
            "rows": sent * link.element + forming + m * m * n / world,
            "ring": (world // 2) * (largest * link.element + pairs) + pairs,
        }
        costs = {way: max(cost, own[way]) for way, cost in costs.items()}
    return costs


def _forming(piece: Piece) -> float:
    """Multiply-adds of explicit rows."""
    shapes = tuple([operand.shape for operand in piece.operands])
    if is_of_lookup(piece.equation):
        return float(prod(shapes[1]))
    return cost_of_rows(piece.equation, shapes)


def _pair(first: Piece, second: Piece, share: Share, places: int) -> float:
    """Multiply-adds of the products of two pieces, of the same rank or alike."""
    shapes = [tuple([operand.shape for operand in of.operands]) for of in (first, second)]
    if not any(is_of_lookup(of.equation) for of in (first, second)):
        if first.region == second.region:
            return cost_of_products(first.equation, shapes[0], second.equation, shapes[1])
        # Parts of a parameter that share elements meet as rows of the whole, others do not meet.
        if not overlap(first.region, second.region):
            return 0.0
        return float(prod(prod(share.sizes[of.part]) for of in (first, second)) * places)
    # A lookup meets the tokens that it has in common with the other, at most all.
    read = min(prod(of[-1]) for of in shapes)
    return float(read * shapes[0][0][0] * 16)


def _bytes(share: Share, name: str) -> int:
    """How many bytes the factors of a parameter have, each tensor once."""
    return Packet((name,), 0, 1, 0).places_in(share)[1]


def _buckets(
    names: Sequence[str], regions: dict[str, Region], shares: Sequence[Share], limit: int
) -> list[tuple[Slice, ...]]:
    """What is exchanged together as rows, so that neither end has too many elements at once."""
    world = len(shares)
    most = max(max(share.m for share in shares), -(-sum(share.m for share in shares) // world))
    room = max(1, min(limit, _BUCKET) // max(1, most))
    buckets: list[tuple[Slice, ...]] = []
    bucket: list[Slice] = []
    taken = 0
    for name in names:
        region, start = regions[name], 0
        size = region.canonical.shape[0] if region.canonical.shape else 1
        units = size if region.is_gapless else 1  # with gaps, it goes in one piece
        step = region.places // units
        while start < units:
            if bucket and taken + step > room:
                buckets.append(tuple(bucket))
                bucket, taken = [], 0
            stop = min(units, start + max(1, (room - taken) // step))
            end = stop if region.is_gapless else size
            bucket.append(Slice(name, start, end, (stop - start) * step))
            taken += (stop - start) * step
            start = stop
    # In the order in which backward passes complete them, more or less.
    return [*buckets, tuple(bucket)][::-1] if bucket else buckets[::-1]


def _packets(names: Sequence[str], shares: Sequence[Share], room: int, limit: int) -> list[Packet]:
    """What is exchanged together as factors.

    What there is room for goes together, and one parameter may have as much as the limit.
    """
    groups: list[tuple[list[str], int]] = []
    taken = 0
    for name in names:
        elements = max(_bytes(share, name) for share in shares) // 4
        if not groups or taken + elements > room:
            groups.append(([], 1))
            taken = 0
        groups[-1][0].append(name)
        taken += elements
        if elements > limit:  # it is alone
            most = max((b for share in shares for _, b in share.sizes), default=1)
            groups[-1] = groups[-1][0], min(-(-elements // max(1, limit)), most)
    return [
        Packet(tuple(group), piece, pieces, turn % 2)
        for turn, (group, pieces) in enumerate(groups)
        for piece in range(pieces)
    ]
