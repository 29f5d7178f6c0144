"""Assertions on the Gramian and on the gradients of small models, and the losses they are for."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.environment import ADDS_UP_IN_ORDER, LAST_BITS

# Largest error of an entry over the largest entry.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}

ModelFactory = Callable[[], nn.Module]

# Asserts that our tensor and a plain one agree; with a name for the message.
Comparison = Callable[[Tensor, Tensor, str], None]


@dataclass(frozen=True)
class Objectives:
    """Losses of a model's output, whose first dimension counts the samples."""

    name: str
    of: Callable[[Tensor], Tensor]
    batch_dim: int | Literal["auto"] | None = "auto"

    def __repr__(self) -> str:
        return self.name


def irregular(*shape: int) -> Tensor:
    """Fixed numbers between -1 and 1 without a pattern: matrices of them have full rank."""
    places = torch.arange(1, math.prod(shape) + 1, dtype=torch.get_default_dtype())
    return places.square().sin().view(shape)


def features(output: Tensor, count: int) -> Tensor:
    """``count`` different and not linear functions of each sample's part of an output."""
    flat = output.reshape(output.shape[0], -1)
    return (flat + 0.3 * flat.sin()) @ irregular(flat.shape[1], count).to(flat.dtype)


def _mixed(output: Tensor) -> Tensor:
    per_sample = features(output, 1)
    return (irregular(4, len(per_sample)).to(per_sample.dtype) @ per_sample).sin().squeeze(1)


PER_SAMPLE = Objectives("(B,)", lambda output: features(output, 1).squeeze(1))
SEVERAL = Objectives("(B, K)", lambda output: features(output, 3))
SECOND = Objectives("(K, B)", lambda output: features(output, 2).T, batch_dim=1)
TABLE = Objectives("(B, 2, 2)", lambda output: features(output, 4).unflatten(1, (2, 2)))
SCALAR = Objectives("()", lambda output: features(output, 1).sum(), batch_dim=None)
COUPLED = Objectives("coupled", _mixed, batch_dim=None)
UNCOUPLED = Objectives("coupled (B,)", PER_SAMPLE.of, batch_dim=None)

EVERY_KIND = [PER_SAMPLE, SEVERAL, SECOND, TABLE, SCALAR, COUPLED, UNCOUPLED]
WITHOUT_SAMPLES = [SCALAR, COUPLED]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the model that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def in_real(x: Tensor) -> Tensor:
    """A tensor with a last dimension for the parts of complex numbers, if it has such."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def assert_close_to_reference(actual: Tensor, expected: Tensor) -> None:
    """Assert that the largest error is small beside the largest entry."""
    assert actual.shape == expected.shape
    assert expected.abs().max() > 0, "an expectation of zeros shows nothing"
    error = float((actual - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCES[expected.dtype], f"relative error {error:.1e}"


def assert_same_numbers(ours: Tensor, plain: Tensor, name: str = "") -> None:
    """Assert that two tensors agree bit for bit.

    Ask for it where the same kernels run on the same values, with equal sizes and strides. A kernel
    may compute the elements of a vector and those that are left over by different instructions, and
    which elements these are depends on sizes and strides.

    On a GPU, the last bits may differ: those of PyTorch's own results do from one call to the next.
    """
    if ADDS_UP_IN_ORDER:
        assert torch.equal(ours, plain), name
    else:
        assert_same_but_for_last_bits(ours, plain, name)


def assert_same_but_for_last_bits(ours: Tensor, plain: Tensor, name: str = "") -> None:
    """Assert that two tensors agree, where other kernels may have computed one of them."""
    bits = LAST_BITS * torch.finfo(plain.dtype).eps
    largest = float(plain.detach().abs().max())
    torch.testing.assert_close(
        ours, plain, rtol=bits, atol=bits * largest, msg=lambda text: f"{name} {text}"
    )


def assert_same_gradients(
    model: nn.Module, twin: nn.Module, assert_same: Comparison = assert_same_numbers
) -> None:
    """Assert that `.grad` of all parameters of two models of one structure agree."""
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            ours, plain = parameter.grad.to_dense(), other.grad.to_dense()  # of sparse embeddings
            assert_same(ours, plain, name)


def assert_gramian_is_exact(
    make_model: ModelFactory,
    *inputs: Any,
    objectives: Objectives = PER_SAMPLE,
    memory_limit_bytes: int = 2**29,
    assert_same: Comparison = assert_same_numbers,
) -> None:
    """Assert that an engine computes the Gramian and leaves the gradients alone.

    The Gramian is compared with autograd on a twin of the model, made before the engine, one
    objective at a time; the gradients after an ordinary backward pass must be those of the twin,
    as `assert_same` compares them: bit for bit unless it is another. The first call searches for
    the samples and the second knows them; both must be right.
    """
    model = make_model()
    twin = copy.deepcopy(model)
    engine = Engine(model, batch_dim=objectives.batch_dim, memory_limit_bytes=memory_limit_bytes)

    losses, expected_losses = _losses(model, inputs, objectives), _losses(twin, inputs, objectives)
    assert_same_numbers(losses, expected_losses)
    jacobian = reference_jacobian(expected_losses, trainable(twin))
    expected = jacobian @ jacobian.T
    assert_close_to_reference(engine.compute_gramian(losses), expected)
    assert_close_to_reference(engine.compute_gramian(losses), expected)
    assert all(parameter.grad is None for parameter in model.parameters()), "left behind in .grad"

    weights = torch.linspace(0.5, 2.0, losses.numel()).view(losses.shape)
    losses.backward(weights)
    expected_losses.backward(weights)
    assert_same_gradients(model, twin, assert_same)


def _losses(model: nn.Module, inputs: tuple[Any, ...], objectives: Objectives) -> Tensor:
    """Losses of copies of the inputs, which the model may change, with equal random numbers."""
    torch.manual_seed(1)
    return objectives.of(model(*copy.deepcopy(inputs)))
