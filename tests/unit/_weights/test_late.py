"""Weights on a GPU, which no step waits for: zeros are taken for them, and a later call raises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, NonFiniteError, StaleCaptureError, _weights
from autogram._capture.samples.replays import Flag
from tests.unit._weights.as_on_a_gpu import look_as_on_a_gpu
from tests.unit.engines import batch, mlp, per_sample

MESSAGE = r"An earlier call had weights .* zeros instead.*`engine\.check_replays\(\)`"

CALLS: dict[str, Callable[[Engine, Tensor], Any]] = {
    "gramian": lambda engine, losses: engine.compute_gramian(losses),
    "jacobian": lambda engine, losses: engine.jacobian(losses),
    "backward": lambda engine, losses: engine.backward(losses, torch.diagonal),
    "weights": lambda engine, losses: engine.weights(losses, torch.diagonal),
    "sketch": lambda engine, losses: engine.sketch(losses, 4),
    "check": lambda engine, _: engine.check_replays(),
}


def not_finite(gramian: Tensor) -> Tensor:
    """Of the first objective alone."""
    return torch.cat([gramian.new_full((1,), torch.nan), gramian.new_ones(len(gramian) - 1)])


def losses_of(*modules: nn.Module) -> Tensor:
    x = batch(4, 3)
    for module in modules:
        x = module(x)
    return per_sample(x)


@pytest.mark.parametrize("name", CALLS)
def test_the_next_call_raises_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`.grad` gets zeros, of all leaves, and the weights that are returned are as they were."""
    look_as_on_a_gpu(monkeypatch, arrives=True)
    model, head = mlp(), nn.Linear(2, 2)
    engine = Engine(model)
    weights = engine.backward(losses_of(model, head), not_finite)
    assert weights.isnan().tolist() == [True, False, False, False]
    assert not any(p.grad.any() for p in [*model.parameters(), *head.parameters()])
    losses = losses_of(model, head)
    with pytest.raises(NonFiniteError, match=MESSAGE):
        CALLS[name](engine, losses)
    CALLS[name](engine, losses)


def test_norms_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call raises, and the norms that are returned show it."""
    look_as_on_a_gpu(monkeypatch, arrives=True)
    model = mlp()
    engine = Engine(model, verify="never")
    engine.clip(losses_of(model), 1.0)
    norms = engine.clip(losses_of(model) * torch.tensor([1.0, torch.inf, 1.0, 1.0]), 1.0)
    assert norms.isfinite().tolist() == [True, False, True, True]
    with pytest.raises(NonFiniteError, match=MESSAGE):
        engine.clip(losses_of(model), 1.0)
    assert engine.clip(losses_of(model), 1.0).isfinite().all()


def test_what_has_not_arrived_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a check that waits, which tells of all calls before it at once."""
    look_as_on_a_gpu(monkeypatch, arrives=False)
    model = mlp()
    engine = Engine(model)
    for _ in range(3):
        engine.backward(losses_of(model), torch.diagonal)
        engine.backward(losses_of(model), not_finite)
    with pytest.raises(NonFiniteError, match=MESSAGE):
        engine.check_replays()


def test_jacobians_and_their_engine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    look_as_on_a_gpu(monkeypatch, arrives=True)
    model = mlp()
    engine = Engine(model)
    jacobian = engine.jacobian(losses_of(model))
    weights = not_finite(torch.ones(4, 4))
    for call in (lambda: jacobian.accumulate_grad(torch.ones(4)), engine.check_replays):
        jacobian.accumulate_grad(weights)
        with pytest.raises(NonFiniteError, match=MESSAGE):
            call()
    assert not any(p.grad.any() for p in model.parameters())


def test_weights_alone_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is added to `.grad` here, and their user sees them."""
    look_as_on_a_gpu(monkeypatch, arrives=True)
    model = mlp()
    engine = Engine(model)
    assert engine.weights(losses_of(model), not_finite).isnan().any()
    with pytest.raises(NonFiniteError, match=MESSAGE):
        engine.check_replays()


def test_in_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replays tell of it, if they were prepared; else gradients show it."""
    look_as_on_a_gpu(monkeypatch)
    model = mlp()
    engine = Engine(model)
    jacobian = engine.jacobian(losses_of(model))
    weights = not_finite(torch.ones(4, 4))
    monkeypatch.setattr(_weights, "is_captured", lambda _device: True)
    jacobian.accumulate_grad(weights)
    assert all(p.grad.isnan().any() for p in model.parameters())
    model.zero_grad()
    engine.compute_gramian(losses_of(model))
    engine.prepare_capture()
    jacobian.accumulate_grad(weights)
    assert not any(p.grad.any() for p in model.parameters())
    with pytest.raises(StaleCaptureError, match="weights that are not finite"):
        engine.check_replays()
    engine.check_replays()


def test_a_captured_step_asks_for_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses that, and with it the capture."""
    asked = []

    class Event:
        def query(self) -> bool:
            asked.append(None)
            return True

    flag = Flag([torch.tensor(False)])
    flag._events = [Event()]  # type: ignore[list-item]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not flag.has_arrived
    assert asked == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert flag.has_arrived
    assert asked == [None]
