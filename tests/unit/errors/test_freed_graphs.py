"""Graphs that an earlier backward pass has freed: the message names the call that did it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, FreedGraphError
from tests.unit.engines import assert_works, batch, mlp, per_sample


def backward(engine: Engine, losses: Tensor) -> None:
    engine.backward(losses, torch.diagonal)


def add(engine: Engine, losses: Tensor) -> None:
    with engine.accumulate(torch.diagonal) as step:
        step.add(losses)


def clip(engine: Engine, losses: Tensor) -> None:
    engine.clip(losses, 1.0)


def ordinary(_: Engine, losses: Tensor) -> None:
    losses.sum().backward()


BEFORE: dict[str, tuple[Callable[[Engine, Tensor], None], str]] = {
    "backward": (
        backward,
        r"Pass `retain_graph=True` to the first call, `engine\.backward`, which",
    ),
    "clip": (clip, r"Pass `retain_graph=True` to the first call, `engine\.clip`, which"),
    "accumulate": (add, r"`retain_graph=True` to the first call, `add` of `engine\.accumulate`"),
    "ordinary": (ordinary, r"pass that has freed it.*`losses\.backward\(retain_graph=True\)`"),
}
AFTER: dict[str, Callable[[Engine, Tensor], Any]] = {
    "backward": backward,
    "clip": clip,
    "accumulate": add,
    "gramian": lambda engine, losses: engine.compute_gramian(losses),
    "jacobian": lambda engine, losses: engine.jacobian(losses),
    "weights": lambda engine, losses: engine.weights(losses, torch.diagonal),
    "verify": lambda engine, losses: engine.verify(losses),
    "sketch": lambda engine, losses: engine.sketch(losses, 4),
}


def with_settled(model: nn.Module) -> Engine:
    """An engine whose next fused step frees its graph, as one that is not verified."""
    engine = Engine(model, verify="never")
    for _ in range(3):
        backward(engine, per_sample(model(batch(4, 3))))
        model.zero_grad()
    return engine


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
def test_the_call_that_has_freed_it(before: str, after: str) -> None:
    model = mlp()
    engine = with_settled(model)
    losses = per_sample(model(batch(4, 3)))
    free, message = BEFORE[before]
    free(engine, losses)
    model.zero_grad()
    with pytest.raises(FreedGraphError, match=message) as caught:
        AFTER[after](engine, losses)
    assert "compute_gramian" not in str(caught.value)  # which nobody has called, or not first
    assert_works(engine, model, batch(4, 3))


@pytest.mark.parametrize("before", ["backward", "accumulate"])
def test_that_of_another_engine(before: str) -> None:
    """Of a part of the same model."""
    model = mlp()
    first, second = with_settled(model), Engine(model[2])
    losses = per_sample(model(batch(4, 3)))
    free, message = BEFORE[before]
    free(first, losses)
    model.zero_grad()
    with pytest.raises(FreedGraphError, match=message):
        backward(second, losses)


def test_losses_that_share_a_part() -> None:
    """A second head behind the same trunk."""
    trunk, heads = mlp(3, 3), [nn.Linear(3, 2) for _ in range(2)]
    engine = Engine(trunk, *heads, verify="never")
    for number in range(4):
        features = trunk(batch(4, 3))
        first, second = (per_sample(head(features)) for head in heads)
        engine.backward(first, torch.diagonal, retain_graph=number < 3)
        if number < 3:
            backward(engine, second)
    with pytest.raises(FreedGraphError, match=BEFORE["backward"][1]):
        backward(engine, second)


def test_the_graph_of_an_earlier_step() -> None:
    """A state that was not cut off."""
    model = mlp(6, 3)
    engine = Engine(model, verify="never")
    state = torch.zeros(4, 3)
    for number in range(5):
        state = model(torch.cat([batch(4, 3), state], 1))
        losses = per_sample(state)
        if number < 4:
            backward(engine, losses)
            state = state.detach() if number < 3 else state
    with pytest.raises(FreedGraphError, match=r"an earlier step.*`\.detach\(\)`"):
        backward(engine, losses)


def test_a_graph_that_is_kept() -> None:
    """What the message says to do is enough."""
    model = mlp()
    engine = with_settled(model)
    losses = per_sample(model(batch(4, 3)))
    engine.backward(losses, torch.diagonal, retain_graph=True)
    with engine.accumulate(torch.diagonal) as step:
        step.add(losses, retain_graph=True)
    engine.clip(losses, 1.0, retain_graph=True)
    losses.sum().backward(retain_graph=True)
    for call in AFTER.values():
        if call not in (backward, add, clip):
            call(engine, losses)
    backward(engine, losses)
