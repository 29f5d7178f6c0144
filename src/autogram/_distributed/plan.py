"""Plans: choose how ranks multiply their rows of each parameter, by cost, from shapes alone.

*Rows*: each rank gets a slice of the parameter, for the objectives of all ranks. *Ring*: each rank
gets the factors of half of the others, because one of two ranks can compute the products of both.
All ranks know all shapes, and make the same choice.
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

# Elements per bucket. Several buckets are on the way while others are contracted.
_BUCKET = 2**22

_ALIGNED = 16  # bytes, so that each tensor in a buffer can be viewed in its dtype

UNDER_WAY = 2  # buckets or packets that are exchanged while another is formed

Offsets = dict[tuple[int, int | None], tuple[slice, Operand, slice]]
"""Places of tensors in a buffer, and their samples.

Keys: the slot, and the dimension along which the tensor is cut into samples.
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
    pieces: int  # number of ranges of samples
    turn: int  # of two opposite ranks, which one gets the other's factors

    def samples(self, count: int) -> slice:
        """The range of samples, in a part with some number of them."""
        step = -(-count // self.pieces)
        return slice(min(count, self.piece * step), min(count, (self.piece + 1) * step))

    def places_in(self, share: Share) -> tuple[Offsets, int]:
        """Each tensor's place in the buffer of a rank, and the size of the buffer in bytes."""
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
    """How to exchange one step."""

    ways: dict[str, Way]  # for each parameter with blocks on any rank
    buckets: tuple[tuple[Slice, ...], ...]  # exchanged together as rows
    packets: tuple[Packet, ...]  # exchanged as factors

    @property
    def messages(self) -> int:
        """Number of messages that a rank begins and ends one after the other."""
        return len(self.buckets) + len(self.packets)


def make_plan(shares: Sequence[Share], link: Link, way: Way | None = None) -> ExchangePlan:
    """The plan of a step: rows alone, or factors beside rows, if cheaper; or one given way."""
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
    """The plan that takes a given way for each parameter."""
    limit = min(share.limit for share in shares)
    rows, ring = ([name for name in ways if ways[name] == way] for way in ("rows", "ring"))
    buckets = _buckets(rows, regions, shares, limit)
    sources = max(1, len(shares) // 2)  # ranks from which each packet arrives
    most = limit // ((UNDER_WAY + 1) * sources)  # because so many packets are in memory at once
    packets = _packets(ring, shares, min(most, _BUCKET // sources), most)
    return ExchangePlan(ways, tuple(buckets), tuple(packets))


def costs_of(name: str, region: Region, shares: Sequence[Share], link: Link) -> dict[Way, float]:
    """The slowest rank's cost of each way, in multiply-adds, without the cost per message."""
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
    """Multiply-adds to form explicit rows."""
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
        # Regions that share elements are multiplied as rows of the whole; others have no products.
        if not overlap(first.region, second.region):
            return 0.0
        return float(prod(prod(share.sizes[of.part]) for of in (first, second)) * places)
    # A lookup multiplies the tokens that both have in common, at most all.
    read = min(prod(of[-1]) for of in shapes)
    return float(read * shapes[0][0][0] * 16)


def _bytes(share: Share, name: str) -> int:
    """Bytes of a parameter's factors, each tensor counted once."""
    return Packet((name,), 0, 1, 0).places_in(share)[1]


def _buckets(
    names: Sequence[str], regions: dict[str, Region], shares: Sequence[Share], limit: int
) -> list[tuple[Slice, ...]]:
    """Groups slices to exchange together as rows, without too many elements at either end."""
    world = len(shares)
    most = max(max(share.m for share in shares), -(-sum(share.m for share in shares) // world))
    room = max(1, min(limit, _BUCKET) // max(1, most))
    buckets: list[tuple[Slice, ...]] = []
    bucket: list[Slice] = []
    taken = 0
    for name in names:
        region, start = regions[name], 0
        size = region.canonical.shape[0] if region.canonical.shape else 1
        units = size if region.is_gapless else 1  # a region with gaps goes in one piece
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
    # Roughly in the order in which backward passes complete them.
    return [*buckets, tuple(bucket)][::-1] if bucket else buckets[::-1]


def _packets(names: Sequence[str], shares: Sequence[Share], room: int, limit: int) -> list[Packet]:
    """Groups factors to exchange together.

    Parameters share a packet while it has room. A single parameter may fill the limit.
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
        if elements > limit:  # alone in its packets
            most = max((b for share in shares for _, b in share.sizes), default=1)
            groups[-1] = groups[-1][0], min(-(-elements // max(1, limit)), most)
    return [
        Packet(tuple(group), piece, pieces, turn % 2)
        for turn, (group, pieces) in enumerate(groups)
        for piece in range(pieces)
    ]
