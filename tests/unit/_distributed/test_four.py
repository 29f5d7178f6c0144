"""Four processes: pairs of opposite ranks, meshes of two dimensions, ranks of their own kind."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

from autogram import Engine, RankError
from tests.unit._distributed import test_ddp, test_fsdp, test_plain, test_scaler
from tests.unit._distributed.worlds import (
    Routed,
    Tied,
    World,
    assert_step,
    tokens,
    two_of_each,
    weighting,
)
from tests.unit.processes import Scenario

pytestmark = pytest.mark.slow

RANKS = 4


def a_mesh_that_replicates_and_shards(rank: int) -> None:
    """Gradients are summed over both dimensions."""
    mesh = distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
    )
    world = World()
    model, twin = world.model(), world.model()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = Engine(model, distributed=mesh)
    for step in range(3):
        assert_step(engine, world, model, twin, step, test_fsdp.gradient)
    del rank


def a_rank_that_raises(rank: int) -> None:
    """Its number is in the error of all."""
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    for failing in range(RANKS):
        losses = world.losses(model(world.batch(rank, 0)))
        with pytest.raises(RankError, match=f"on rank {failing}") as raised:
            engine.backward(losses.detach() if rank == failing else losses, weighting)
        assert raised.value.ranks == [failing]
        assert_step(engine, world, model, twin, 1 + failing)


def groups_of_two(rank: int) -> None:
    """Two Gramians at the same time, of two ranks each."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        world = World()
        model, twin = world.model(), world.model()
        engine = Engine(model, distributed=mesh[name])
        alone = Engine(twin)
        members = mesh[name].mesh.flatten().tolist()
        for step in range(2):
            losses = world.losses(model(world.batch(rank, step)))
            gramian = engine.compute_gramian(losses)
            batches = torch.cat([world.batch(other, step) for other in members])
            expected = alone.compute_gramian(world.losses(twin(batches)))
            torch.testing.assert_close(gramian, expected)


class Branches(nn.Module):
    """A part for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6) for _ in range(RANKS)])
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.parts[distributed.get_rank()](x)))


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    found: dict[str, Scenario] = {}
    worlds: dict[str, Any] = {
        "two losses each": World(losses=two_of_each),
        "tied embedding": World(Tied, tokens),
        "parts of some ranks": World(Routed),
        "a part for each rank": World(Branches),
        "ranks without objectives": World(sizes=[3, 0, 2, 0]),
    }
    for name, world in worlds.items():
        for way in (None, "ring"):
            found[f"{name}, {way}"] = partial(test_plain.series, world, way, 2**29)
    for way in ("rows", "ring"):
        little = partial(test_plain.series, worlds["two losses each"], way, 256)
        found[f"{way}, little memory"] = little
    found["DDP"] = partial(test_ddp.series, World(), test_ddp.Wrap)
    found["DDP, static"] = test_ddp.static_graph_and_a_gramian_alone
    always = partial(test_fsdp.nested, reshard_after_forward=True)
    found["fully_shard"] = partial(test_fsdp.series, World(), always, "first")
    of_all = test_scaler.of_all
    for how, wrap in test_scaler.WRAPS.items():
        scaled = partial(test_scaler.series, World(), wrap, "second micro-batch", of_all)
        found[f"a gradient scaler, {how}"] = scaled
    for alone in (a_mesh_that_replicates_and_shards, a_rank_that_raises, groups_of_two):
        found[alone.__name__] = alone
    return found


@pytest.mark.parametrize("name", scenarios())
def test_in_four_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
