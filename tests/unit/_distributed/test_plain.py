"""Ranks with a plain module: Gramian, weights and gradients of all objectives, exactly."""

from collections.abc import Mapping
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed, nn

from autogram import Engine, UnsupportedError
from autogram._distributed.plan import Way
from autogram.testing import reference_jacobian
from tests.unit._distributed import test_scaler
from tests.unit._distributed.worlds import (
    Gappy,
    Parts,
    Routed,
    Tied,
    TiedByColumns,
    Waves,
    World,
    assert_same_on_all,
    assert_step,
    cnn,
    flat_gradient,
    images,
    mlp,
    tokens,
    two_of_each,
    weighting,
)
from tests.unit.checks import assert_close_to_reference
from tests.unit.processes import RANKS, Scenario

WORLDS = {
    "mlp": World(),
    "two losses each": World(losses=two_of_each),
    "images": World(cnn, images),
    "complex": World(Waves),
    "tied embedding": World(Tied, tokens),
    "tied embedding by columns": World(TiedByColumns, tokens),
    "views with holes": World(Gappy),
    "parts of parameters": World(Parts),
    "parts of some ranks": World(Routed),
    "ranks without objectives": World(sizes=[3, 0, 2, 4]),
    "nobody has any": World(sizes=[0]),
}
WAYS: tuple[Way | None, ...] = (None, "rows", "ring")
STEPS = 3


def series(world: World, way: Way | None, limit: int, rank: int) -> None:
    """Steps in which the sizes of batches change."""
    del rank
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True, memory_limit_bytes=limit, verify="always")
    engine._ranks.way = way
    for step in range(STEPS):
        assert_step(engine, world, model, twin, step)


def in_two_passes(rank: int) -> None:
    """`own` has the form of the losses, and `weights` does both."""
    world = World(losses=two_of_each)
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=distributed.group.WORLD)
    for step in range(STEPS):
        jacobian, _ = world.expected(twin, step)
        for by_own in (True, False):
            model.zero_grad()
            losses = world.losses(model(world.batch(rank, step)))
            if by_own:
                weights = engine.own(weighting(engine.compute_gramian(losses)))
            else:
                weights = engine.weights(losses, weighting)
            losses.backward(weights)
            total = flat_gradient(model)
            distributed.all_reduce(total)
            assert_close_to_reference(total, jacobian.T @ weighting(jacobian @ jacobian.T))
    model.zero_grad()
    with pytest.raises(
        UnsupportedError, match=r"clips the samples of one process.*Make an engine without"
    ):
        engine.clip(losses, 1.0)
    assert all(p.grad is None for p in model.parameters())


def gradients_add_up(rank: int) -> None:
    """Beside what is in `.grad` before."""
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    total = torch.full_like(flat_gradient(model), 2.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    for step in range(STEPS):
        jacobian, _ = world.expected(twin, step)
        engine.backward(world.losses(model(world.batch(rank, step))), weighting)
        total += jacobian.T @ weighting(jacobian @ jacobian.T)
        assert_close_to_reference(flat_gradient(model), total)


def random_weights_are_those_of_the_first_rank(rank: int) -> None:
    """Though each rank would draw others."""
    world = World()
    model = world.model()
    engine = Engine(model, distributed=True)
    torch.manual_seed(rank)
    losses = world.losses(model(world.batch(rank, 0)))
    torch.manual_seed(rank)
    found = engine.backward(losses, lambda gramian: torch.rand(len(gramian)))
    torch.manual_seed(0)
    expected = torch.rand(sum(world.sizes[:2]))
    start = sum(world.sizes[:rank])
    assert_close_to_reference(found, expected[start : start + len(found)])


def several_losses(rank: int) -> None:
    """A dict of losses for each task, and weights in its form."""
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)

    def tasks(output: Tensor) -> dict[str, Tensor]:
        return {"one": output.square().sum(1), "two": output.sin().sum(1)}

    world = World(losses=lambda y: torch.stack(list(tasks(y).values()), 1))
    jacobian, _ = world.expected(twin, 0)
    losses = tasks(model(world.batch(rank, 0)))
    gramian = engine.compute_gramian(losses)
    assert_close_to_reference(gramian, jacobian @ jacobian.T)
    assert {k: v.shape for k, v in engine.own(weighting(gramian)).items()} == {
        k: v.shape for k, v in losses.items()
    }
    weights = engine.backward(losses, weighting)
    assert weights.keys() == losses.keys()
    expected = jacobian.T @ weighting(jacobian @ jacobian.T)
    assert_close_to_reference(flat_gradient(model), expected)


def accumulation(rank: int) -> None:
    """Micro-batches of different numbers on the ranks: one Gramian, and one communication."""
    world = World(losses=two_of_each)
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    engine.compute_gramian(world.losses(model(world.batch(rank, 0))))  # has a form of its own
    for step in range(STEPS):
        numbers = [(step + other) % 3 for other in range(RANKS)]  # none at times
        rows = []
        for other, number in enumerate(numbers):
            for i in range(number):
                losses = world.losses(twin(world.batch(other, 10 * step + i)))
                rows.append(reference_jacobian(losses, list(twin.parameters())))
        jacobian = torch.cat(rows)
        model.zero_grad()
        before = engine._ranks.agreement.calls
        with engine.accumulate(weighting) as batches:
            for i in range(numbers[rank]):
                batches.add(world.losses(model(world.batch(rank, 10 * step + i))))
        assert engine._ranks.agreement.calls == before + 3
        expected = jacobian @ jacobian.T
        assert_close_to_reference(batches.gramian, expected)
        assert_close_to_reference(flat_gradient(model), jacobian.T @ weighting(expected))
        assert_same_on_all(flat_gradient(model))
        assert [x.dim() for x in batches.weights] == [2] * numbers[rank]
        own = engine.own(weighting(expected))  # one after the other
        found = [x.flatten() for x in batches.weights]
        torch.testing.assert_close(own, torch.cat([*found, own[:0]]))


def coupled_objectives(rank: int) -> None:
    """Batch normalisation of each rank by itself: its objectives are coupled."""
    del rank

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))

    world = World(make)
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    for step in range(STEPS):
        assert_step(engine, world, model, twin, step)


def a_group_of_some(rank: int) -> None:
    """Each rank alone, by a group and by a mesh."""
    groups = [distributed.new_group([other]) for other in range(distributed.get_world_size())]
    mesh = distributed.device_mesh.init_device_mesh(
        "cpu", (distributed.get_world_size(), 1), mesh_dim_names=("a", "b")
    )
    world = World()
    alone = Engine(twin := world.model())
    for given in (groups[rank], mesh["b"]):
        model = world.model()
        engine = Engine(model, distributed=given)
        x = world.batch(rank, 0)
        twin.zero_grad()
        expected = alone.backward(world.losses(twin(x)), weighting)
        found = engine.backward(world.losses(model(x)), weighting)
        assert_close_to_reference(found, expected)
        assert_close_to_reference(flat_gradient(model), flat_gradient(twin))


def a_mesh_of_two_dimensions(rank: int) -> None:
    """All of its ranks."""
    del rank
    size = distributed.get_world_size()
    mesh = distributed.device_mesh.init_device_mesh("cpu", (size // 2, 2))
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=mesh)
    assert_step(engine, world, model, twin, 0)


def known_shapes_are_told_by_a_hash(rank: int) -> None:
    """They are exchanged when they are new, and not when they come again."""
    world = World(sizes=[3])
    model = world.model()
    engine = Engine(model, distributed=True, verify="never")
    group = engine._ranks.group
    with patch.object(group, "gather_objects", wraps=group.gather_objects) as gathered:
        for step in range(5):
            engine.compute_gramian(world.losses(model(world.batch(rank, step))))
        assert gathered.call_count == 1
        other = World(sizes=[4])
        for step in range(5):
            engine.compute_gramian(other.losses(model(other.batch(rank, step))))
        assert gathered.call_count == 2


def two_engines(rank: int) -> None:
    """Whose calls come in turns."""
    del rank
    first, second = World(), World(cnn, images)
    models = [first.model(), second.model()]
    twins = [first.model(), second.model()]
    engines = [Engine(model, distributed=True) for model in models]
    groups = {id(engine._ranks.group._data) for engine in engines}
    assert len(groups) == 1, "each new group costs connections to all ranks"
    for step in range(STEPS):
        for which, world in enumerate((first, second)):
            assert_step(engines[which], world, models[which], twins[which], step)


def replaced_parameters(rank: int) -> None:
    """While losses of before live, and where a rank without objectives has no blocks to show."""
    world = WORLDS["ranks without objectives"]
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    alive = []
    for step in range(2 * STEPS):
        assert_step(engine, world, model, twin, step)
        alive.append(world.losses(model(world.batch(rank, step))))
        for each in (model, twin):
            each[step % 2 * 2] = World(mlp).model()[step % 2 * 2]


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    found: dict[str, Scenario] = {}
    for name, world in WORLDS.items():
        for way in WAYS:
            found[f"{name}, {way}"] = partial(series, world, way, 2**29)
        found[f"{name}, little memory"] = partial(series, world, None, 256)
    for way in WAYS[1:]:
        for name in ("two losses each", "tied embedding", "images"):
            found[f"{name}, {way}, little memory"] = partial(series, WORLDS[name], way, 256)
    for take in ("fused", "two passes", "second micro-batch"):
        scaled = partial(test_scaler.series, World(), test_scaler.plain, take, test_scaler.of_all)
        found[f"a gradient scaler, {take}"] = scaled
    for alone in (
        in_two_passes,
        gradients_add_up,
        random_weights_are_those_of_the_first_rank,
        several_losses,
        accumulation,
        coupled_objectives,
        a_group_of_some,
        a_mesh_of_two_dimensions,
        known_shapes_are_told_by_a_hash,
        two_engines,
        replaced_parameters,
    ):
        found[alone.__name__] = alone
    return found


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
