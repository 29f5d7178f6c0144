"""Rows that leave during the pass: exact, and exchanged again where they were not foreseen."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, RankError
from autogram._blocks import Columns
from autogram._distributed import plan
from tests.unit._distributed.worlds import (
    Tied,
    World,
    assert_step,
    mlp,
    tokens,
    two_of_each,
    weighting,
)
from tests.unit.processes import RANKS, Scenario

pytestmark = pytest.mark.slow

STEPS = 6


def engine_of(model: nn.Module, **options: Any) -> Engine:
    """One whose parameters all go as rows."""
    engine = Engine(model, distributed=True, **options)
    engine._ranks.way = "rows"
    return engine


def rows_leave_early(rank: int) -> None:
    """From the second step of the same shapes on: all buckets but the last ones."""
    for world in (World(sizes=[4]), World(sizes=[4], losses=two_of_each)):
        model, twin = world.model(), world.model()
        engine = engine_of(model, verify="never")
        for step in range(STEPS):
            assert_step(engine, world, model, twin, step)
            buckets = len(engine._ranks.plan.buckets)
            assert buckets > 3
            assert engine._ranks.early == (0 if step == 0 else buckets)
    del rank


def shapes_come_and_go(rank: int) -> None:
    """What was foreseen for one does not hold for another, also if it is new on one rank alone."""
    worlds = [World(sizes=sizes) for sizes in ([4], [5, 2], [3, 0], [4, 5])]
    model, twin = worlds[0].model(), worlds[0].model()
    engine = engine_of(model)
    early = []
    for step in range(3 * len(worlds)):
        assert_step(engine, worlds[step % len(worlds)], model, twin, 0)
        if len(worlds[step % len(worlds)].batch(rank, 0)):  # else there is no pass
            early.append(engine._ranks.early)
    assert not any(early[:3])
    assert all(early[-3:])


class Experts(nn.Module):
    """Samples go to parts by their values, which no graph shows."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for i, part in enumerate(self.parts):
            (own,) = torch.nonzero((x[:, 0] > 0) == bool(i), as_tuple=True)
            if len(own):
                y = y.index_add(0, own, part(x[own]))
        return self.last(torch.tanh(y))


def what_values_decide(rank: int) -> None:
    """Shapes of factors and of rows differ from step to step."""
    world = World(Experts, sizes=[6])
    model, twin = world.model(), world.model()
    for way in ("rows", "ring"):
        engine = Engine(model, distributed=True)
        engine._ranks.way = way
        for step in range(STEPS):
            assert_step(engine, world, model, twin, step)
        engine.remove()
    del rank


def what_was_not_foreseen_is_exchanged_again(rank: int) -> None:
    """One rank has another limit since memory ran out there; after some times nobody foresees."""
    world = World(sizes=[4])
    model, twin = world.model(), world.model()
    engine = engine_of(model, verify="never")
    found = []
    for step in range(3 * STEPS):
        if rank == 1 and step % 2:
            engine._limit.elements -= 1
        assert_step(engine, world, model, twin, step)
        found.append((engine._ranks.repeated, engine._ranks.early > 0))
    assert found[1] == (2, False)  # a Gramian and a step
    assert found[2] == (2, True)
    assert found[-1][0] == found[-2][0] <= 6


def a_pass_that_begins_again(rank: int) -> None:
    """Cotangents that cannot be batched after all, and all rows are taken twice."""
    world = World(sizes=[4], losses=two_of_each)
    model, twin = world.model(), world.model()
    model[1] = Unbatchable()
    engine = engine_of(model)
    for step in range(STEPS):
        assert_step(engine, world, model, twin, step)
    del rank


class Unbatchable(nn.Module):
    """A hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return _Tanh.apply(x)


class _Tanh(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        float(g.sum())  # what a batch of cotangents does not have
        return g * (1 - y * y)


def a_rank_that_raises_meanwhile(rank: int) -> None:
    """In its pass, or while it forms rows: the others go on to the end, and all raise."""
    world = World(sizes=[4])
    model, twin = world.model(), world.model()
    engine = engine_of(model, verify="never")
    for step in range(2):
        assert_step(engine, world, model, twin, step)
    for call in (
        engine.compute_gramian,
        lambda losses: engine.backward(losses, weighting),
        lambda losses: engine.weights(losses, weighting),
    ):
        losses = world.losses(model(world.batch(rank, 0)))
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(Columns, "slice", _fail)
            with pytest.raises(RankError, match=r"(?s)on rank 1.*MemoryError: it is full"):
                call(losses)
        y = model(world.batch(rank, 0))
        if rank == 0:
            y.register_hook(_fail)
        with pytest.raises(RankError, match=r"(?s)on rank 0.*MemoryError: it is full"):
            call(world.losses(y))
        with pytest.raises(RankError, match=r"(?s)on rank 1.*do not require a gradient"):
            call(losses.detach() if rank == 1 else losses)
        assert_step(engine, world, model, twin, 3)


def _fail(*_: object) -> None:
    raise MemoryError("it is full")


def a_table_that_is_complete_last(rank: int) -> None:
    """An embedding that is tied to the output layer, in the order of the graph."""
    world = World(Tied, tokens, sizes=[3])
    model, twin = world.model(), world.model()
    engine = engine_of(model)
    for step in range(STEPS):
        assert_step(engine, world, model, twin, step)
    assert engine._ranks.early > 0
    del rank


def a_weighting_that_raises(rank: int) -> None:
    """Where all is well but that."""
    world = World(sizes=[4])
    model, twin = mlp(), world.model()
    model = world.model()
    engine = engine_of(model)
    for step in range(3):
        losses = world.losses(model(world.batch(rank, step)))
        with pytest.raises(RankError, match="MemoryError: it is full"):
            engine.backward(losses, _fail)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        assert_step(engine, world, model, twin, step)
        model.zero_grad()


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    plan._BUCKET = 64  # in the processes, which do nothing else
    found = (
        rows_leave_early,
        shapes_come_and_go,
        what_values_decide,
        what_was_not_foreseen_is_exchanged_again,
        a_pass_that_begins_again,
        a_rank_that_raises_meanwhile,
        a_table_that_is_complete_last,
        a_weighting_that_raises,
    )
    return {scenario.__name__: scenario for scenario in found}


NAMES = [
    "rows_leave_early",
    "shapes_come_and_go",
    "what_values_decide",
    "what_was_not_foreseen_is_exchanged_again",
    "a_pass_that_begins_again",
    "a_rank_that_raises_meanwhile",
    "a_table_that_is_complete_last",
    "a_weighting_that_raises",
]


@pytest.mark.parametrize("name", NAMES)
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
