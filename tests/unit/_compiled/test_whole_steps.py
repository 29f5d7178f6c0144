"""Whole steps of a training loop that are compiled, with the calls of an engine in them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, UnsupportedError
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import compiled
from tests.unit.checks import assert_close_to_reference

Step = Callable[[Engine, nn.Module, Tensor], None]


def _weigh(gramian: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, len(gramian), device=gramian.device)


def _losses(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().sum(1)
    return found


def _fused(engine: Engine, model: nn.Module, x: Tensor) -> None:
    engine.backward(_losses(model, x), _weigh)


def _two_passes(engine: Engine, model: nn.Module, x: Tensor) -> None:
    losses = _losses(model, x)
    losses.backward(_weigh(engine.compute_gramian(losses)))


def _with_jacobian(engine: Engine, model: nn.Module, x: Tensor) -> None:
    with engine.paused():
        model(x)
    jacobian = engine.jacobian(_losses(model, x))
    jacobian.accumulate_grad(_weigh(jacobian.gramian()))


def _accumulated(engine: Engine, model: nn.Module, x: Tensor) -> None:
    with engine.accumulate(_weigh) as batch:
        for part in x.chunk(2):
            batch.add(_losses(model, part))


@pytest.mark.parametrize("step", [_fused, _two_passes, _with_jacobian, _accumulated])
def test_gradients(step: Step) -> None:
    """The model is compiled and seen inside; the engine's calls run as they are."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    engine = Engine(model, unseen="error")
    run = compiled(step)
    for size in (4, 4, 6):
        x = torch.randn(size, 3)
        with engine.paused():
            jacobian = reference_jacobian(_losses(model, x), model.parameters())
        model.zero_grad()
        run(engine, model, x)
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert_close_to_reference(found, jacobian.T @ _weigh(jacobian))


@pytest.mark.parametrize("step", [_fused, _two_passes, _with_jacobian, _accumulated])
def test_compiled_autograd_is_refused(step: Step) -> None:
    """It traces the nodes of a graph, and runs what it has traced in the next pass."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    engine = Engine(model)
    x = torch.randn(4, 3)
    message = "`torch._dynamo.config.compiled_autograd = False`"
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(UnsupportedError, match=message),
    ):
        compiled(step)(engine, model, x)
    compiled(step)(engine, model, x)
    assert all(p.grad is not None for p in model.parameters())
