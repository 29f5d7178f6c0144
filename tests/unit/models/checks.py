"""Assertions on the Gramian and on the gradients of a whole model."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autogram.testing import reference_jacobian

TOLERANCE = 1e-10  # largest error of an entry of the Gramian over its largest entry, in float64


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the model that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def relative_error(gramian: Tensor, jacobian: Tensor) -> float:
    """Largest difference of an entry from `jacobian @ jacobian.T`, over the largest entry."""
    expected = jacobian @ jacobian.T
    return float((gramian - expected).abs().max() / expected.abs().max())


def assert_gramian_equals_autograd(gramian: Tensor, losses: Tensor, model: nn.Module) -> None:
    """Assert that it is the Gramian of the losses, differentiated by autograd one at a time."""
    assert gramian.shape == (losses.numel(), losses.numel())
    error = relative_error(gramian, reference_jacobian(losses, trainable(model)))
    assert error < TOLERANCE, f"relative error {error:.1e}"


def assert_same_gradients(model: nn.Module, twin: nn.Module) -> None:
    """Assert that `.grad` of all parameters of two models of one structure agree bit for bit."""
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, other.grad), name


def assert_no_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Assert that nothing has been accumulated in `.grad`."""
    assert all(parameter.grad is None for parameter in parameters)
