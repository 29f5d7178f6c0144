"""Assertions on an engine that the test has made, and small models for it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable


def assert_exact(engine: Engine, losses: Tensor, *modules: nn.Module) -> None:
    """Assert that the engine gives the Gramian that plain autograd gives for some modules."""
    parameters = {p: None for module in modules for p in trainable(module)}
    gramian = engine.compute_gramian(losses)
    jacobian = reference_jacobian(losses, parameters)
    assert_close_to_reference(gramian, jacobian @ jacobian.T)


def assert_works(engine: Engine, model: nn.Module, *inputs: Tensor) -> None:
    """Assert that nothing is left of what was before: the next step of a training loop is right."""
    assert_nothing_is_left(model.parameters())
    assert_exact(engine, per_sample(model(*inputs)), model)


def assert_nothing_is_left(parameters: Iterable[Tensor]) -> None:
    """Assert that no mode is active and that nothing has been accumulated in `.grad`."""
    assert _get_current_function_mode_stack() == []
    assert all(parameter.grad is None for parameter in parameters)


def per_sample(output: Tensor) -> Tensor:
    """One loss for each sample of an output, whose first dimension counts the samples."""
    return (output.square() + output).flatten(1).sum(1)


def mlp(inputs: int = 3, outputs: int = 2) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def batch(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(shape)
