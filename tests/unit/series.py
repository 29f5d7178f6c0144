"""Series of steps in which something changes: an engine is right in each, or refuses it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import CoupledObjectivesWarning, Engine, MixedSamplesError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, in_real, irregular, trainable

# From hidden activations (4, 4, 4) and what changes to a tensor whose dimension 0 the losses count.
Operator = Callable[[Tensor, Any], Tensor]


def back_and_forth(count: int) -> list[int]:
    """The order in which the steps of a series take their arguments: the first two alike."""
    return [0, 0, 1, 0, 1, 1, 0] if count == 2 else [0, 0, *range(1, count), 0, 1]


def assert_series_is_exact(
    losses_of: Callable[[Any], Tensor],
    modules: Sequence[nn.Module],
    arguments: Sequence[Any],
    *,
    batch_dim: Any = "auto",
    fused: bool = False,
) -> None:
    """Assert that the engine agrees with plain autograd at each step, without a check of its own.

    With ``batch_dim="auto"`` it may treat the objectives as coupled, and with a dimension it may
    refuse a step by name. Else the first wrong step fails.
    """
    parameters = [p for module in modules for p in trainable(module)]
    plain = []
    order = back_and_forth(len(arguments))
    for step in order:
        losses = losses_of(arguments[step])
        plain.append((losses.detach(), reference_jacobian(losses, parameters)))
    assert not torch.equal(plain[1][1], plain[2][1]), "the arguments make no difference"

    engine = Engine(*modules, batch_dim=batch_dim, verify="never")
    for step, (expected, jacobian) in zip(order, plain, strict=True):
        for parameter in parameters:
            parameter.grad = None
        losses = losses_of(arguments[step])
        torch.testing.assert_close(losses.detach(), expected)
        weights = irregular(losses.numel())
        try:
            if fused:
                _, gramian = engine.backward(losses, lambda _, w=weights: w, return_gramian=True)
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
                flat = torch.cat([in_real(gradient).flatten() for gradient in gradients])
                assert_close_to_reference(flat, weights @ jacobian)
            else:
                gramian = engine.compute_gramian(losses)
        except MixedSamplesError:
            if batch_dim == "auto":
                raise
            continue
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
    engine.remove()


class Inside(nn.Module):
    """Linear, operator, linear."""

    def __init__(self, operator: Operator, features: int) -> None:
        super().__init__()
        self.operator = operator
        self.first, self.last = nn.Linear(3, 4), nn.Linear(features, 2)

    def forward(self, x: Tensor, argument: Any) -> Tensor:
        y = self.operator(self.first(x).tanh(), argument)
        return self.last(y if y.dim() > 1 else y.unsqueeze(1)).tanh()


def in_model(operator: Operator, argument: Any) -> tuple[list[nn.Module], Callable[[Any], Tensor]]:
    """A model with the operator inside of it, and its losses."""
    y = operator(irregular(4, 4, 4), argument)
    model = Inside(operator, y.shape[-1] if y.dim() > 1 else 1)
    x = irregular(4, 4, 3)
    return [model], lambda argument: _rows(model(x, argument))


def in_tail(operator: Operator, argument: Any) -> tuple[list[nn.Module], Callable[[Any], Tensor]]:
    """A model with the operator behind it, and its losses."""
    del argument
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    x = irregular(4, 4, 3)
    return [model], lambda argument: _rows(operator(model(x), argument))


def _rows(y: Tensor) -> Tensor:
    """One loss for each entry of dimension 0."""
    flat = y.reshape(len(y), -1)
    return (flat + 0.3 * flat.sin()) @ irregular(flat.shape[1])


PLACES = pytest.mark.parametrize("place", [in_model, in_tail], ids=["model", "tail"])
CALLS = pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
BATCH_DIMS = pytest.mark.parametrize("batch_dim", ["auto", 0], ids=["auto", "dim0"])
MAY_BE_COUPLED = pytest.mark.filterwarnings(f"ignore::autogram.{CoupledObjectivesWarning.__name__}")
