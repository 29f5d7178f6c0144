"""Gradients that are differentiated again: parameters are read by nodes of autograd alone."""

import re
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import Engine, UnseenUseWarning, VerificationError
from autogram._capture.samples.ways import BROADCASTING, WayStep
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import counted_passes

Losses = Callable[[nn.Module, Tensor], Tensor]


def perceptron(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(2, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, 1))
    )


class Shared(nn.Module):
    """A layer that is used twice, with a scale and a bias of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((self.layer(x) * self.scale).sin()).sum(1, keepdim=True)


class Boundary(nn.Module):
    """Values that are multiplied by a function of the points, as for conditions at a boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (x * (1 - x)).prod(1, keepdim=True)


class Tokens(nn.Module):
    """A linear layer on tokens, a normalisation, and another matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 4), nn.LayerNorm(4)
        self.matrix = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.flip(1)], 1)  # (b, 2, 2)
        return (self.norm(self.first(tokens)).tanh() @ self.matrix).flatten(1).sin()


class Atoms(nn.Module):
    """Each sample is several points, whose energies are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron(nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.stack([x, x.flip(1), x * 2], 1)).sum(1)


class Images(nn.Module):
    """A convolution, whose double backward pass has no factors here."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv1d(1, 3, 2), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.convolution(x.unsqueeze(1)).tanh().flatten(1))


class Normalized(nn.Module):
    """Statistics of groups, by which the second gradient comes to the call past its tap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.GroupNorm(2, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.norm(self.first(x))))


class Woven(nn.Module):
    """Weights that are computed from those of a normalisation and others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2)
        self.factor = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.norm(self.first(x)))
        mixing = self.norm.weight.view(2, 2) @ self.factor  # (2, 4)
        last = F.linear(hidden, self.last.weight * self.norm.weight, self.last.bias)
        return (F.linear(hidden, mixing).tanh() + last).sum(1, keepdim=True)


class Scale(torch.autograd.Function):
    """A product with a parameter, of which the derivative is such a product, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return Scale.apply(cotangent, scale), (cotangent * x).sum(0)


class Customized(nn.Module):
    """A custom autograd Function between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = (
            nn.Linear(2, 4),
            nn.Parameter(torch.randn(4)),
            nn.Linear(4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Scale.apply(self.first(x), self.scale).tanh())


class Recurrent(nn.Module):
    """A layer, which is one call to the engine and several nodes to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.unsqueeze(2))[1][0])


class Cells(nn.Module):
    """A cell, which PyTorch composes of linear layers, called for two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(1, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cell(x[:, :1], x.new_zeros(len(x), 3))
        return self.last(self.cell(x[:, 1:], hidden))


class Checkpointed(nn.Module):
    """Layers that run again in each backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Complex(nn.Module):
    """A product of complex numbers with a weight that is made of two real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.parts = nn.Parameter(torch.rand(2)), nn.Parameter(torch.randn(2, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.complex((self.scale * x).sin(), x.cos()) @ torch.view_as_complex(self.parts)
        return waves.abs().square().sum(1, keepdim=True).sin()


class Sine(nn.Module):
    """An activation between layers of a SIREN."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 3.0).sin()


class Adaptive(nn.Module):
    """Slopes and other parameters that are broadcast to what gradients are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.slopes, self.shift = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.rand(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.slopes[0] * self.first(x)).tanh() * self.shift.expand(len(x), 4)
        hidden = torch.where(hidden > 0, hidden / self.slopes[1], hidden - self.shift)
        return self.last((self.slopes[2] * hidden * self.second(hidden)).sin() ** 2 / self.shift)


def normalized_layers() -> nn.Module:
    """Layer normalisations with and without a bias, of one dimension and of two."""
    return nn.Sequential(
        *(nn.Linear(2, 6), nn.LayerNorm(6), nn.Tanh(), nn.Unflatten(1, (2, 3))),
        *(nn.LayerNorm((2, 3), bias=False), nn.Flatten(), nn.SiLU(), nn.Linear(6, 1)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "sines": lambda: perceptron(Sine),
    "adaptive": Adaptive,
    "normalized layers": normalized_layers,
    "softplus": lambda: perceptron(nn.Softplus),
    "gelu": lambda: perceptron(nn.GELU),
    "silu": lambda: perceptron(nn.SiLU),
    "elu": lambda: perceptron(nn.ELU),
    "shared": Shared,
    "boundary": Boundary,
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 4)), nn.Tanh(), nn.Linear(4, 1)
    ),
    "tokens": Tokens,
    "atoms": Atoms,
    "images": Images,
    "normalized": Normalized,
    "woven": Woven,
    "customized": Customized,
    "recurrent": Recurrent,
    "cells": Cells,
    "checkpointed": Checkpointed,
    "complex": Complex,
}


def slopes(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    values = model(x)
    (of_points,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    return values.square().sum(1) + of_points.square().sum(1)


def laplacian(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0] for i in (0, 1)]
    return second[0][:, 0] + second[1][:, 1] + x.prod(1)


def several(model: nn.Module, x: Tensor) -> Tensor:
    """A slope and a value for each point, ``(B, 2)``."""
    x = x.clone().requires_grad_()
    values = model(x).sum(1)
    (of_points,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    return torch.stack([of_points.square().sum(1), values.square()], 1)


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return slopes(model, x) + sum(p.square().sum() for p in model.parameters())


LOSSES: list[Losses] = [slopes, laplacian, several, with_penalty]


def assert_step(engine: Engine, model: nn.Module, losses: Tensor) -> None:
    """Assert that the Gramian, and the gradients of a fused step, are those of plain autograd."""
    parameters = trainable(model)
    jacobian = reference_jacobian(losses.flatten(), parameters)
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
    weights = torch.linspace(0.5, 1.5, losses.numel())
    model.zero_grad()
    engine.backward(losses, lambda _: weights, retain_graph=True)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    assert_close_to_reference(torch.cat([x.flatten() for x in found]), jacobian.T @ weights)


@pytest.fixture(autouse=True)
def without_cudnn() -> Iterator[None]:
    """Its recurrent layers have no second derivatives."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
@pytest.mark.parametrize("batch_dim", [0, None])
@pytest.mark.parametrize("losses", LOSSES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("model", MODELS)
def test_series_of_steps(model: str, losses: Losses, batch_dim: int | None) -> None:
    """In which numbers of points, kinds of losses and frozen parts change."""
    network = MODELS[model]()
    engine = Engine(network, batch_dim=batch_dim, verify="always")
    for samples, of in zip((4, 3, 4, 1, 4, 3), (losses, losses, slopes, losses) * 2, strict=False):
        assert_step(engine, network, of(network, torch.rand(samples, 2)))
        first, *_ = network.parameters()
        first.requires_grad_(not first.requires_grad or samples == 3)


@pytest.mark.parametrize(
    ("model", "losses"),
    [
        *product(
            (
                "perceptron",
                "softplus",
                "gelu",
                "silu",
                "elu",
                "boundary",
                "sines",
                "adaptive",
                "atoms",
            ),
            (slopes, laplacian, several),
        ),
        *product(("normalized layers",), (slopes, several)),  # PyTorch has views in a third pass
    ],
)
def test_factors_cost_one_pass(model: str, losses: Losses) -> None:
    """Products of matrices have factors: no rows, no warning, and one pass in later steps."""
    network = MODELS[model]()
    engine = Engine(network, unseen="error", verify="never")
    for step in range(4):
        vector = losses(network, torch.rand(6, 2))
        with counted_passes(vector) as passes:
            engine.compute_gramian(vector)
        if step > 1:
            assert len(passes) == 1
    assert "fallback" not in str(engine)


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Rsub": torch.rsub,
    "Mul": torch.mul,
    "Div": torch.div,
    "Pow": torch.pow,
    "Where": lambda x, p: torch.where(x > 0.5, x, p),
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Lerp": lambda x, p: torch.lerp(x, x.sin(), p),
    "Addcmul": lambda x, p: torch.addcmul(x, x.sin(), p),
    "Addcdiv": lambda x, p: torch.addcdiv(x, x.sin(), p),
    "Expand": lambda x, p: p.expand(x.shape),
}


@pytest.mark.parametrize("operation", sorted(BROADCASTING))
def test_what_is_broadcast_gets_the_gradient_of_each_element(operation: str) -> None:
    """Autograd sums it behind the node, by the shape of the input."""
    x, p = torch.rand(3, 4).requires_grad_(), torch.rand(4).requires_grad_()
    result, cotangent = CALLS[operation](x, p), torch.rand(3, 4)
    edges = [edge for edge, _ in result.grad_fn.next_functions]
    step = WayStep(result.grad_fn, edges.index(get_gradient_edge(p).node))
    with torch.no_grad():
        found = step.carry(cotangent)
    assert found is not None
    assert found.shape == x.shape
    (expected,) = torch.autograd.grad(result, p, cotangent)
    assert_close_to_reference(found.sum(0), expected)


def test_other_nodes_have_rows_sample_by_sample() -> None:
    """With one warning, which names the node and the parameter."""
    model = Images()
    engine = Engine(model)
    text = r"in ConvolutionBackwardBackward0, `convolution\.weight`"
    with pytest.warns(UnseenUseWarning, match=text):
        assert_step(engine, model, slopes(model, torch.rand(4, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_step(engine, model, slopes(model, torch.rand(4, 2)))


WEIGHTS = ("weight_ih", "bias_hh", "weight_hh", "bias_ih")


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("normalized", ["norm.weight", "norm.bias"]),
        ("recurrent", [*(f"layer.{x}_l0" for x in WEIGHTS), "last.weight"]),
        ("woven", ["norm.weight", "norm.bias"]),
        ("customized", ["scale"]),
    ],
)
def test_rows_of_the_losses_are_of_some_parameters(model: str, names: list[str]) -> None:
    """Those that are read inside of a recorded call, or by a custom autograd Function."""
    network = MODELS[model]()
    engine = Engine(network, verify="always")
    with pytest.warns(UnseenUseWarning) as told:
        assert_step(engine, network, slopes(network, torch.rand(4, 2)))
    text = re.search(r"in the losses, (.*?)[.;] (Calls|in)", str(told[0].message))
    assert text is not None
    assert re.findall(r"`(.*?)`", text[1]) == names
    for samples in (3, 4):
        assert_step(engine, network, slopes(network, torch.rand(samples, 2)))


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
def test_points_that_share_a_derivative() -> None:
    """A slope of the mean over all points depends on every point: the losses are coupled."""
    model = perceptron()
    engine = Engine(model, batch_dim=None)
    for samples in (4, 3):
        x = torch.rand(samples, 2).requires_grad_()
        (of_points,) = torch.autograd.grad(model(x).square().mean().exp(), x, create_graph=True)
        assert_step(engine, model, of_points.square().sum(1))


def test_constant_factor_without_samples() -> None:
    """A product of a constant with a weight that is no use: all samples read all of it."""
    mixing = torch.randn(5, 5)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(2, 5), nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.first(x).tanh(), mixing @ self.weight).sum(1, keepdim=True)

    model = Mixed()
    engine = Engine(model, verify="always")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnseenUseWarning)
        for samples in (5, 3, 5):
            assert_step(engine, model, slopes(model, torch.rand(samples, 2)))


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
def test_two_engines_and_a_part_that_is_left_out() -> None:
    """Each has the parameters of its modules, and hooks that are off keep some of them out."""
    model = perceptron()
    engines: list[Any] = [Engine(model[0]), Engine(model[2], model[4])]
    parts = [list(model[0].parameters()), [*model[2].parameters(), *model[4].parameters()]]
    for samples in (4, 3, 4):
        losses = slopes(model, torch.rand(samples, 2))
        for engine, parameters in zip(engines, parts, strict=True):
            jacobian = reference_jacobian(losses, parameters)
            assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
    whole = Engine(model)
    whole.hooks.deactivate(module=model[2])
    losses = slopes(model, torch.rand(4, 2))
    jacobian = reference_jacobian(losses, [*model[0].parameters(), *model[4].parameters()])
    assert_close_to_reference(whole.compute_gramian(losses), jacobian @ jacobian.T)


def _clamped(_module: nn.Module, _args: Any, output: Tensor) -> None:
    """Clips the gradient of an activation."""
    output.register_hook(lambda gradient: gradient.clamp(min=0))


def test_a_verification_that_fails() -> None:
    """Its cause is looked for in a pass that has uses in the tail of its own."""
    model = perceptron()
    model[1].register_forward_hook(_clamped)
    with pytest.raises(VerificationError, match="the samples are mixed, or the engine"):
        Engine(model, batch_dim=0).compute_gramian(slopes(model, torch.rand(4, 2)))
