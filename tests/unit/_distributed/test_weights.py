"""Weights that are not finite: all ranks refuse them, and none waits for another."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autogram import Engine, NonFiniteError
from tests.unit._distributed.worlds import World, assert_step, mlp, of_each, vectors
from tests.unit._weights.as_on_a_gpu import look_as_on_a_gpu
from tests.unit.processes import RANKS, Scenario

WORLD = World(mlp, vectors, of_each)


def not_finite(gramian: Tensor) -> Tensor:
    """For an objective of the last rank alone."""
    return torch.cat([gramian.new_ones(len(gramian) - 1), gramian.new_full((1,), torch.nan)])


def fused(engine: Engine, losses: Tensor) -> None:
    engine.backward(losses, not_finite)


def accumulated(engine: Engine, losses: Tensor) -> None:
    with engine.accumulate(not_finite) as step:
        step.add(losses[:1], retain_graph=True)
        step.add(losses[1:])


def alone(engine: Engine, losses: Tensor) -> None:
    engine.weights(losses, not_finite)


def refused(write: Callable[[Engine, Tensor], None], wrap: type | None, rank: int) -> None:
    """Nothing is added to `.grad`, and the next step is right."""
    model = WORLD.model()
    called: nn.Module = model if wrap is None else wrap(model)
    engine = Engine(model, distributed=True)
    for _ in range(2):
        losses = of_each(called(WORLD.batch(rank, 0)))
        with pytest.raises(NonFiniteError, match="weights of the objectives 7 are infinite"):
            write(engine, losses)
        assert all(p.grad is None for p in model.parameters())
    twin = WORLD.model()
    for step in range(1, 3):
        assert_step(engine, WORLD, called, twin, step)


def refused_later(rank: int) -> None:
    """As on a GPU: zeros on all ranks, and an error of all of them in the very next call."""
    with pytest.MonkeyPatch.context() as patch:
        look_as_on_a_gpu(patch, arrives=rank == 0)
        model = WORLD.model()
        engine = Engine(model, distributed=True)
        fused(engine, of_each(model(WORLD.batch(rank, 0))))
        assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
        with pytest.raises(RuntimeError, match="An earlier call had weights"):
            engine.compute_gramian(of_each(model(WORLD.batch(rank, 0))))
        assert_step(engine, WORLD, model, WORLD.model(), 1)


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    wraps = {"plain": None, "ddp": DistributedDataParallel}
    found: dict[str, Scenario] = {
        f"{write.__name__} {name}": partial(refused, write, wrap)
        for write in (fused, accumulated, alone)
        for name, wrap in wraps.items()
    }
    return {**found, "later": refused_later}


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
