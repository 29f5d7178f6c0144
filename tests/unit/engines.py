"""Assertions on an engine that the test has made, and small models for it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable


def assert_exact(engine: Engine, losses: Tensor, *modules: nn.Module) -> None:
    """Assert that the engine gives the Gramian that plain autograd gives for some modules."""
    parameters = {p: None for module in modules for p in trainable(module)}
    gramian = engine.compute_gramian(losses)
    jacobian = reference_jacobian(losses, parameters)
    assert_close_to_reference(gramian, jacobian @ jacobian.T)


def assert_as_rounded(
    engine: Engine, losses: Tensor, model: nn.Module, dtype: torch.dtype
) -> float:
    """Assert that a Gramian has no more errors than the rows of plain autograd, on the same graph.

    Autograd rounds each entry of a row to the dtype of the network, once: by its unit roundoff u at
    most. A product of two rows is then off by 2 u of the largest entry. So much again is allowed
    for cotangents of several objectives, which go through the network together or one by one.

    Returns:
        The largest error of an entry over the largest entry.
    """
    gramian = engine.compute_gramian(losses)
    assert gramian.dtype == torch.float32
    jacobian = reference_jacobian(losses, trainable(model)).double()
    expected = jacobian @ jacobian.T
    error = float((gramian - expected).abs().max() / expected.abs().max())
    roundoff = torch.finfo(dtype).eps / 2
    assert 0 < error < 4 * roundoff, f"{error / roundoff:.1f} times the unit roundoff"
    return error


@contextmanager
def counted_passes(losses: Tensor) -> Iterator[list[None]]:
    """A list that gets an entry for each backward pass from some losses in a block.

    Products through one piece of a graph, between two taps, are not counted.
    """
    passes: list[None] = []
    handle = losses.register_hook(lambda _: passes.append(None))
    try:
        yield passes
    finally:
        handle.remove()


def assert_exact_in_one_pass(engine: Engine, losses: Tensor, model: nn.Module) -> None:
    """Assert that a Gramian is exact, and that no pass was made to find the samples."""
    with counted_passes(losses) as passes:
        engine.compute_gramian(losses)
    assert len(passes) == 1
    assert_exact(engine, losses, model)


def assert_works(engine: Engine, model: nn.Module, *inputs: Tensor) -> None:
    """Assert that nothing is left of what was before: the next step of a training loop is right."""
    assert_nothing_is_left(model.parameters())
    assert_exact(engine, per_sample(model(*inputs)), model)


def assert_nothing_is_left(parameters: Iterable[Tensor]) -> None:
    """Assert that no mode is active and that nothing has been accumulated in `.grad`."""
    modes = _get_current_function_mode_stack()
    assert all(isinstance(mode, DeviceContext) for mode in modes)  # of the default device
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
