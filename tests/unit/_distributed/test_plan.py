"""Plans: the cheapest way of each parameter, by shapes and link alone, within the limit."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._distributed import plan as plans
from autogram._distributed.group import Link
from autogram._distributed.plan import Packet, costs_of, make_plan
from autogram._distributed.share import Share, data_of
from tests.unit._distributed.worlds import Parts
from tests.unit.engines import per_sample

SLOW, FAST = Link(element=1e4, call=1e6), Link(element=1e-3, call=1e-3)


def share(model: nn.Module, x: Tensor, limit: int = 2**27) -> Share:
    """What a rank with such a batch has."""
    engine = Engine(model, memory_limit_bytes=4 * limit, verify="never")
    return data_of(engine.jacobian(per_sample(model(x)), keep="factors")).share


def wide(size: int, positions: int, features: int = 64) -> tuple[nn.Module, Tensor]:
    return nn.Linear(features, features), torch.randn(size, positions, features)


def test_many_positions_are_exchanged_as_rows() -> None:
    """Factors have more elements than rows."""
    plan = make_plan([share(*wide(2, 1000))] * 4, SLOW)
    assert set(plan.ways.values()) == {"rows"}


def test_few_positions_are_exchanged_as_factors() -> None:
    """Of a weight: its rows have the size of the weight for each sample."""
    plan = make_plan([share(*wide(8, 1))] * 4, SLOW)
    assert plan.ways["weight"] == "ring"


def test_what_is_cheapest_depends_on_the_link() -> None:
    """With a fast one, half of the products are worth it; and messages cost nothing."""
    shares = [share(*wide(2, 40))] * 2
    region = dict(shares[0].parameters)["weight"]
    slow, fast = (costs_of("weight", region, shares, link) for link in (SLOW, FAST))
    assert min(slow, key=slow.__getitem__) == "rows"
    assert slow["rows"] > 100 * fast["rows"]


def test_beginning_messages_is_weighed() -> None:
    """A handful of numbers is not worth a message of its own."""
    shares = [share(*wide(8, 1, 4))] * 16
    patient = make_plan(shares, Link(element=1.0, call=0.0))
    hurried = make_plan(shares, Link(element=1.0, call=1e12))
    assert hurried.messages == 1 <= patient.messages


def test_parts_of_a_parameter() -> None:
    """They have indices of their own, and meet only where they share elements."""
    shares = [share(Parts(), torch.randn(2, 6))] * 2
    assert len({piece.region for piece in shares[0].pieces["second.weight"]}) > 1
    assert make_plan(shares, SLOW).ways.keys() == dict(shares[0].parameters).keys()


@pytest.mark.parametrize("limit", [16, 100, 1000, 10**6])
def test_buckets_and_packets_keep_the_limit(limit: int) -> None:
    """What is sent, and what is received, down to one row of a range and one sample."""
    shares = [share(*wide(size, 3, 8), limit) for size in (2, 5)]
    m = sum(x.m for x in shares)
    by_rows = make_plan(shares, SLOW, "rows")
    for bucket in by_rows.buckets:
        elements = sum(part.elements for part in bucket)
        received = m * -(-elements // 2)
        assert max(received, 5 * elements) <= limit + 7 or _is_smallest(bucket)
    _assert_complete(by_rows.buckets, shares)
    for several in (shares, shares * 4):
        plan, sources = make_plan(several, SLOW, "ring"), len(several) // 2
        for packet in plan.packets:  # of which three are there at once
            sizes = [_elements(x, packet) for x in several]
            assert 3 * sources * max(sizes) <= limit + 21 * sources or packet.pieces == 5
        names = {name for packet in plan.packets for name in packet.names}
        assert names == {"weight", "bias"}


def test_packets_are_small_enough_to_be_contracted_while_others_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where all factors together keep the limit."""
    monkeypatch.setattr(plans, "_BUCKET", 1000)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    for several, count in ((2, 4), (8, 12)):
        shares = [share(model, torch.randn(5, 3, 8))] * several
        packets = make_plan(shares, SLOW, "ring").packets
        assert len(packets) >= count
        assert all(packet.pieces == 1 for packet in packets)


def _is_smallest(bucket: Sequence[object]) -> bool:
    return len(bucket) == 1 and bucket[0].stop == bucket[0].start + 1


def _elements(share: Share, packet: Packet) -> int:
    return packet.places_in(share)[1] // 8  # the tests' dtype


def _assert_complete(buckets: Sequence[Sequence[object]], shares: Sequence[Share]) -> None:
    """Each element of each parameter once."""
    for name, region in shares[0].parameters:
        parts = [part for bucket in buckets for part in bucket if part.name == name]
        starts = sorted((part.start, part.stop) for part in parts)
        assert starts[0][0] == 0
        assert starts[-1][1] == region.shape[0]
        assert all(first[1] == second[0] for first, second in pairwise(starts))
        assert sum(part.elements for part in parts) == region.places
