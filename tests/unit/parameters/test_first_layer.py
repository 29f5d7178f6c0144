"""A first layer that is not recorded: the samples that it reads have no node in the graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import assert_exact

pytestmark = pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")


class Product(torch.autograd.Function):
    """A linear map of torch calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient.T @ ctx.saved_tensors[0]


class Kernel(Product):
    """The same by a kernel, of which PyTorch sees no call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)


class Rounded(torch.autograd.Function):
    """A weight in few bits, with the gradient of the weight itself, which no sample is behind."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor) -> Tensor:
        del ctx
        return (weight / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        del ctx
        return gradient, None


FIRST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Function": Product.apply,
    "kernel": Kernel.apply,
    "vmap": lambda x, weight: torch.func.vmap(lambda row: weight @ row)(x),
}
OF_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Function": lambda x, weight: F.linear(x, Rounded.apply(weight, torch.tensor(0.1))),
    "vmap": lambda x, weight: F.linear(x, torch.func.vmap(lambda row: row * 0.5)(weight)),
}


class Model(nn.Module):
    """A layer by some function, and ordinary layers behind it."""

    def __init__(self, first: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.randn(6, 3))
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x, self.weight).tanh()))
        return y


def losses_of(model: nn.Module, samples: int) -> Tensor:
    """A loss for each sample."""
    losses: Tensor = model(torch.randn(samples, 3)).square().sum(1)
    return losses


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("batch_dim", ["auto", 0, None])
@pytest.mark.parametrize("verify", ["never", "first"])
def test_the_layers_behind_have_their_rules(name: str, batch_dim: Any, verify: Any) -> None:
    """They are no part of what the losses are computed from parameters alone by."""
    model = Model(FIRST[name])
    engine = Engine(model, batch_dim=batch_dim, verify=verify)
    for samples in (5, 5, 4, 1, 6, 5):
        assert_exact(engine, losses_of(model, samples), model)
    lines = str(engine.report()).splitlines()
    for line in lines:
        assert "the losses" not in line
    call = "an ordinary pass" if batch_dim is None else "linear"
    assert [line for line in lines if line.startswith("last.weight") and call in line]


@pytest.mark.parametrize("name", OF_WEIGHTS)
@pytest.mark.parametrize("batch_dim", ["auto", 0])
def test_a_transformed_weight_with_a_row_for_each_sample(name: str, batch_dim: Any) -> None:
    """By its size, it could be samples. What it is not is found out, once."""
    model = Model(OF_WEIGHTS[name])
    engine = Engine(model, batch_dim=batch_dim, verify="never")
    for samples in (6, 6, 4, 6):
        assert_exact(engine, losses_of(model, samples), model)
        is_first = "6 samples" not in str(engine.report())
    assert not is_first


@pytest.mark.parametrize("name", ["Function", "kernel"])
def test_what_counts_is_the_forward_pass(name: str) -> None:
    """Whatever is switched or replaced behind it, also where nothing else has parameters."""
    model = Model(FIRST[name])
    model.last.requires_grad_(requires_grad=False)
    model.norm = nn.Identity()
    inner = nn.Sequential(model, nn.PReLU(2))
    engine = Engine(inner, verify="never")
    with engine.hooks.inactive(module=inner[1]):
        losses = losses_of(inner, 5)
    assert_exact(engine, losses, model)
    losses, before = losses_of(inner, 5), trainable(inner)
    model.weight = nn.Parameter(model.weight.detach().clone())
    jacobian = reference_jacobian(losses, before)
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
