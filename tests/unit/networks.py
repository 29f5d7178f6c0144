"""Modules that put one difficulty into a model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.checks import ModelFactory, irregular


class Call(nn.Module):
    """One function of the inputs and of some free parameters."""

    def __init__(self, function: Callable[..., Tensor], *shapes: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        self.parameters_ = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(*inputs, *self.parameters_)


class Sine(torch.autograd.Function):
    """A custom function that reads a parameter, which the recorder cannot see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight).sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        g = g * (x * weight).cos()
        return g * weight, (g * x).sum(0)


class AmongOthers(nn.Module):
    """A module behind another use of a parameter, and whose parameters are used once more.

    The second use adds, to the output of each sample, a multiple of fixed combinations of all
    parameters. Its cross terms with the module's own blocks show their signs and the order of their
    dimensions, to which the Gramian of a parameter with a single use is blind.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        output = self.module(x * self.scale if x.is_floating_point() else x)
        combined = sum((p * irregular(*p.shape)).sum() for p in self.module.parameters())
        per_sample = x.to(output.dtype).reshape(output.shape[0], -1).sum(1, keepdim=True).cos()
        return torch.cat([output.reshape(output.shape[0], -1), per_sample * combined], 1)


def call(function: Callable[..., Tensor], *shapes: Sequence[int]) -> ModelFactory:
    """A factory of modules that make one call with parameters of some shapes."""
    return lambda: Call(function, *shapes)


def trained(module: nn.Module) -> nn.Module:
    """The module with random parameters, as after training: none is zero, none are equal."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


class Recurrent(nn.Module):
    """One cell, many times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = self.cell(x).tanh()
        return x
