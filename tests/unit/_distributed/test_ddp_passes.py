"""DistributedDataParallel exchanges gradients once behind each forward pass: no other is lost."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from autogram import Engine, RankError
from autogram.testing import reference_jacobian
from tests.unit._distributed.worlds import (
    World,
    assert_same_on_all,
    flat_gradient,
    weighting,
)
from tests.unit.checks import assert_close_to_reference
from tests.unit.processes import RANKS, Scenario

STEPS = 3
# Buckets of a few parameters, which leave before the pass has ended.
Wrap = partial(DistributedDataParallel, bucket_cap_mb=0.0002)
REFUSED = r"`ddp\.module\(x\)`.*exchanges gradients in one backward pass after each"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "that looks for unused": {"find_unused_parameters": True},
    "of a static graph": {"static_graph": True},
}


def a_second_step(options: Mapping[str, Any], rank: int) -> None:
    """Of the same losses, or behind an ordinary pass of these: refused before anything is added."""
    world = World()
    model, twin = world.model(), world.model()
    wrapped = Wrap(model, **options)
    engine = Engine(wrapped, distributed=True)
    for step in range(2 * STEPS):
        jacobian, _ = world.expected(twin, step)
        expected = jacobian.T @ weighting(jacobian @ jacobian.T)
        wrapped.zero_grad()
        losses = world.losses(wrapped(world.batch(rank, step)))
        if step % 2:
            losses.sum().backward(retain_graph=True)
            expected = jacobian.sum(0) / RANKS
        else:
            engine.backward(losses, weighting, retain_graph=True)
        for _ in range(2):
            with pytest.raises(RankError, match=REFUSED) as raised:
                engine.backward(losses, weighting, retain_graph=True)
            assert raised.value.ranks == [0, 1]
            with pytest.raises(RankError, match=REFUSED), engine.accumulate(weighting) as batch:
                batch.add(losses, retain_graph=True)
        assert_close_to_reference(flat_gradient(wrapped), expected)
        assert_same_on_all(flat_gradient(wrapped))


def steps_behind_two_forward_passes(rank: int) -> None:
    """The wrapper waits for one backward pass; both micro-batches are one step."""
    world = World()
    model, twin = world.model(), world.model()
    wrapped = Wrap(model)
    engine = Engine(wrapped, distributed=True)
    for step in range(STEPS):
        jacobian, _ = world.expected(twin, step)
        expected = jacobian.T @ weighting(jacobian @ jacobian.T)
        wrapped.zero_grad()
        first, second = (world.losses(wrapped(world.batch(rank, step))) for _ in range(2))
        engine.backward(first, weighting)
        with pytest.raises(RankError, match=REFUSED):
            engine.backward(second, weighting)
        assert_close_to_reference(flat_gradient(wrapped), expected)
        assert_same_on_all(flat_gradient(wrapped))


def several_steps_of_the_module_inside(rank: int) -> None:
    """The engine adds up the gradients, as the error says."""
    world = World()
    model, twin = world.model(), world.model()
    wrapped = Wrap(model)
    engine = Engine(wrapped, distributed=True)
    for step in range(STEPS):
        jacobian, _ = world.expected(twin, step)
        expected = jacobian.T @ weighting(jacobian @ jacobian.T)
        wrapped.zero_grad()
        engine.backward(world.losses(wrapped(world.batch(rank, step))), weighting)
        losses = world.losses(wrapped.module(world.batch(rank, step)))
        for number in range(2, 4):
            engine.backward(losses, weighting, retain_graph=True)
            assert_close_to_reference(flat_gradient(wrapped), number * expected)
            assert_same_on_all(flat_gradient(wrapped))


def old_losses_beside_new_ones(rank: int) -> None:
    """The wrapper waits behind the new forward pass."""
    world = World()
    model, twin = world.model(), world.model()
    wrapped = Wrap(model)
    engine = Engine(wrapped, distributed=True)
    first, _ = world.expected(twin, 0)
    second, _ = world.expected(twin, 1)
    old = world.losses(wrapped(world.batch(rank, 0)))
    engine.backward(old, weighting, retain_graph=True)
    wrapped.zero_grad()
    with engine.accumulate(ones) as batch:
        batch.add(old)
        batch.add(world.losses(wrapped(world.batch(rank, 1))))
    assert_close_to_reference(flat_gradient(wrapped), first.sum(0) + second.sum(0))


class Pair(nn.Module):
    """Two parts with parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x).sin(), self.second(x).cos()


def passes_of_different_parameters(rank: int) -> None:
    """The wrapper waits until all of its parameters have had their gradient."""
    world = World(Pair)
    for options in ({}, {"find_unused_parameters": True}):
        for is_ordinary in (False, True):
            model, twin = world.model(), world.model()
            wrapped = Wrap(model, **options)
            engine = Engine(wrapped, distributed=True)
            for step in range(STEPS):
                x = world.batch(rank, step)
                parts = [
                    reference_jacobian(world.losses(y), list(of.parameters())).sum(0)
                    for y, of in zip(twin(x), (twin.first, twin.second), strict=True)
                ]
                if is_ordinary:
                    parts[0] /= RANKS
                expected = torch.cat(parts)
                distributed.all_reduce(expected)
                wrapped.zero_grad()
                first, second = map(world.losses, wrapped(x))
                if is_ordinary:
                    first.sum().backward(retain_graph=True)
                else:
                    engine.backward(first, ones, retain_graph=True)
                # An ordinary pass through what looks for unused parameters is one of all of them.
                if not (is_ordinary and options):
                    engine.backward(second, ones, retain_graph=True)
                else:
                    expected[len(parts[0]) :] = 0
                assert_close_to_reference(flat_gradient(wrapped), expected)
                assert_same_on_all(flat_gradient(wrapped))
                with pytest.raises(RankError, match=REFUSED):
                    engine.backward(second, ones)


def ones(gramian: Tensor) -> Tensor:
    return torch.ones(len(gramian))


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    found: dict[str, Scenario] = {
        f"a second step, {how}": partial(a_second_step, options) for how, options in OPTIONS.items()
    }
    for alone in (
        steps_behind_two_forward_passes,
        several_steps_of_the_module_inside,
        old_losses_beside_new_ones,
        passes_of_different_parameters,
    ):
        found[alone.__name__] = alone
    return found


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
