"""Parameters that are frozen, or begin to be trained, between the forward pass and the call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from autogram import Engine, UnsupportedError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, batch, mlp, per_sample
from tests.unit.faults import weighting
from tests.unit.networks import Sine


class Various(nn.Module):
    """Parameters that are read by a rule, by several calls, by way of another tensor, unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Parameter(batch(6, 4)), nn.Linear(4, 4)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.frequency, self.last = nn.Parameter(torch.linspace(0.5, 1.5, 4)), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.normed(self.first(self.table[x]).tanh())
        hidden = Sine.apply(hidden, self.frequency)
        return self.last(hidden) + hidden @ self.table.T


NAMES = {
    "first.weight": "first.weight",
    "first.bias": "first.bias",
    "table": "table",
    "frequency": "frequency",
    "derived": "normed.parametrizations.weight.original0",
    "penalized": "last.bias",
}


def losses_of(model: Various) -> Tensor:
    """Losses of some samples, with a penalty where nothing is recorded."""
    return per_sample(model(torch.randint(6, (4,)))) + model.last.bias.square().sum()


def backward(engine: Engine, losses: Tensor) -> object:
    return engine.backward(losses, weighting, retain_graph=True)


def accumulate(engine: Engine, losses: Tensor) -> None:
    with engine.accumulate(weighting) as total:
        total.add(losses, retain_graph=True)


CALLS: dict[str, Callable[[Engine, Tensor], object]] = {
    "compute_gramian": Engine.compute_gramian,
    "jacobian": Engine.jacobian,
    "weights": lambda engine, losses: engine.weights(losses, weighting),
    "sketch": lambda engine, losses: engine.sketch(losses, 8),
    "verify": Engine.verify,
    "backward": backward,
    "accumulate": accumulate,
}
WAYS = ["gramian", "backward", "accumulate"]


def step(engine: Engine, way: str, losses: Tensor) -> Tensor:
    """One step, and its Gramian."""
    if way == "gramian":
        gramian = engine.compute_gramian(losses)
        losses.backward(weighting(gramian))
        return gramian
    if way == "backward":
        return engine.backward(losses, weighting, return_gramian=True)[1]
    with engine.accumulate(weighting) as total:
        total.add(losses)
    return total.gramian


def assert_step(engine: Engine, way: str, losses: Tensor, model: nn.Module) -> None:
    """Assert that a step is that of plain autograd, for what requires a gradient now."""
    parameters = dict(model.named_parameters())
    trained = [p for p in parameters.values() if p.requires_grad]
    jacobian = reference_jacobian(losses, trained)
    expected = torch.autograd.grad(
        losses, trained, weighting(jacobian @ jacobian.T), retain_graph=True, allow_unused=True
    )
    model.zero_grad()
    assert_close_to_reference(step(engine, way, losses), jacobian @ jacobian.T)
    found = dict(zip(trained, expected, strict=True))
    for name, parameter in parameters.items():
        gradient = found.get(parameter)
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is not None:
            assert_close_to_reference(parameter.grad, gradient)


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("batch_dim", ["auto", None])
def test_frozen_in_between(name: str, call: str, batch_dim: Any) -> None:
    """J would have rows of it, and no backward pass gives it a gradient: for other weights."""
    model = Various()
    engine = Engine(model, batch_dim=batch_dim)
    parameter = model.get_parameter(NAMES[name])
    for _ in range(3):
        losses = losses_of(model)
        model.zero_grad()
        parameter.requires_grad_(False)
        with pytest.raises(
            UnsupportedError,
            match=rf"frozen after the forward pass: `{NAMES[name]}`\. .*_grad_\(False\)` before",
        ):
            CALLS[call](engine, losses)
        assert all(p.grad is None for p in model.parameters())
        assert_step(engine, "backward", losses_of(model), model)  # frozen before
        parameter.requires_grad_(True)
        assert_step(engine, "backward", losses, model)


@pytest.mark.parametrize("way", WAYS)
def test_trained_from_now_on(way: str) -> None:
    """The graph does not lead to it, for the engine as little as for autograd."""
    model = mlp()
    engine = Engine(model)
    for _ in range(3):
        for frozen in ("0.weight", "0.bias", "2.weight"):
            parameter = model.get_parameter(frozen)
            parameter.requires_grad_(False)
            losses = per_sample(model(batch(4, 3)))
            parameter.requires_grad_(True)
            assert_step(engine, way, losses, model)
            assert parameter.grad is None


def freeze_on_the_way(engine: Engine, model: nn.Sequential) -> None:
    """A step of two micro-batches, behind each of which a bias is frozen."""
    with engine.accumulate(weighting) as total:
        for layer, samples in ((model[0], 4), (model[2], 3)):
            total.add(per_sample(model(batch(samples, 3))))
            layer.bias.requires_grad_(False)


def test_in_an_accumulation() -> None:
    """Behind its micro-batch, and before the weights of all are there."""
    model = mlp()
    engine = Engine(model)
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(UnsupportedError, match=r"frozen after .* `0\.bias`, `2\.bias`\."):
            freeze_on_the_way(engine, model)
        assert all(p.grad is None for p in model.parameters())
        model.requires_grad_(True)
        assert_step(engine, "accumulate", per_sample(model(batch(4, 3))), model)


def test_what_is_no_part_of_the_gramian_may_be_frozen() -> None:
    """Leaves outside of the engine, and what an inactive hook leaves out of J."""
    model, outside = mlp(), nn.Parameter(torch.tensor(1.5))
    engine = Engine(model)
    engine.hooks.deactivate(module=model[0])
    for _ in range(3):
        losses = per_sample(model(batch(4, 3))) * outside
        jacobian = reference_jacobian(losses, model[2].parameters())
        outside.requires_grad_(False)
        model[0].requires_grad_(False)
        gramian = engine.backward(losses, weighting, return_gramian=True)[1]
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        assert all(p.grad is None for p in (outside, *model[0].parameters()))
        outside.requires_grad_(True)
        model.requires_grad_(True)


class Checkpointed(nn.Module):
    """Two layers, the first of which is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda y: self.first(y).tanh(), x, use_reentrant=False))


def test_in_a_checkpoint() -> None:
    """What is computed again reads a parameter that is not as it was, or another one."""
    model = Checkpointed()
    engine = Engine(model)
    for _ in range(2):
        losses = per_sample(model(batch(4, 3)))
        model.first.bias.requires_grad_(False)
        with pytest.raises(UnsupportedError, match=r"after the forward pass: `first\.bias`\."):
            engine.compute_gramian(losses)
        model.requires_grad_(True)
        assert_exact(engine, losses, model)
