"""Half precision, mixed dtypes and autocast, with the tolerance that each one is held to."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, assert_same_gradients, features, trainable
from tests.unit.engines import assert_as_rounded, batch, mlp, per_sample
from tests.unit.environment import DEVICE

# Largest error of an entry over the largest entry, beside the same model in float64. Activations
# and cotangents are rounded at each layer: the error comes from that, and not from the Gramian.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: mlp(6, 3), (8, 6)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()),
        (4, 2, 6, 6),
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True),
        (4, 5, 8),
    ),
    "recurrent": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.RNN(4, 4, batch_first=True)),
        (4, 3, 3),
    ),
}


def _losses(output: Any, each: int = 1) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return per_sample(output) if each == 1 else features(output, each)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error of an entry over the largest entry."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def exact(model: nn.Module, x: Tensor, each: int = 1) -> Tensor:
    """The Gramian in float64, with the parameters and the inputs rounded as they are."""
    model = copy.deepcopy(model).double()
    jacobian = reference_jacobian(_losses(model(x.double()), each), trainable(model))
    return jacobian @ jacobian.T


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("batch_dim", ["auto", None])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_in_low_precision(name: str, dtype: torch.dtype, batch_dim: Any, each: int) -> None:
    """The result is in float32, and as exact as the cotangents are."""
    make, shape = MODELS[name]
    model = make().to(dtype)
    x = batch(*shape).to(dtype)
    expected = exact(model, x, each)
    engine = Engine(model, batch_dim=batch_dim)
    gramian = engine.compute_gramian(_losses(model(x), each))
    assert gramian.dtype == torch.float32
    assert relative_error(gramian, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accumulation_in_float32(dtype: torch.dtype) -> None:
    """Many equal products: in half precision, the sum would stop growing long before the end."""
    model = nn.Linear(4096, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    engine = Engine(model)
    gramian = engine.compute_gramian(model(torch.ones(2, 4096, dtype=dtype)).squeeze(1))
    assert torch.equal(gramian, torch.full((2, 2), 4096.0, dtype=torch.float32))


def test_products_that_overflow_half_precision() -> None:
    """Entries of the Gramian are squares of gradients."""
    model = nn.Linear(3, 1, bias=False).half()
    engine = Engine(model)
    gramian = engine.compute_gramian(model(torch.full((2, 3), 1000.0).half()).squeeze(1))
    assert torch.equal(gramian, torch.full((2, 2), 3e6, dtype=torch.float32))


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["linear", "convolution", "attention"])
def test_autocast(name: str, dtype: torch.dtype, each: int) -> None:
    """The forward pass in half precision, parameters in float32; the call outside or inside."""
    make, shape = MODELS[name]
    model = make().float()
    x = batch(*shape).float()
    expected = exact(model, x, each)
    engine = Engine(model)
    with torch.autocast(DEVICE, dtype=dtype):
        losses = _losses(model(x), each)
        engine.compute_gramian(losses)  # the search for the samples is a pass of another kind
        inside = engine.compute_gramian(losses)
    outside = engine.compute_gramian(losses)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)
    assert relative_error(outside, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("name", ["linear", "convolution", "attention"])
def test_gradients_under_autocast(name: str) -> None:
    """Bit for bit those without an engine."""
    make, shape = MODELS[name]
    model = make().float()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    x = batch(*shape).float()
    for m in (model, twin):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            losses = _losses(m(x))
        if m is model:
            engine.compute_gramian(losses)
        losses.sum().backward()
    assert_same_gradients(model, twin)


class MixedDtypes(nn.Module):
    """A layer in half precision between two in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5).float(), nn.Linear(5, 2).float()
        self.middle = nn.Linear(5, 5).bfloat16()
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x).to(self.middle.weight.dtype)).tanh()
        return self.last(hidden.to(self.last.weight.dtype) * self.scale)


@pytest.mark.parametrize("batch_dim", ["auto", None])
def test_parameters_of_several_dtypes(batch_dim: Any) -> None:
    """Casts in the forward pass, and a parameter that is promoted by what it meets."""
    model = MixedDtypes()
    x = batch(4, 4).float()
    expected = exact(model, x)
    gramian = Engine(model, batch_dim=batch_dim).compute_gramian(per_sample(model(x)))
    assert gramian.dtype == torch.float32
    assert relative_error(gramian, expected) < TOLERANCES[torch.bfloat16]


def test_one_parameter_in_float64_among_others() -> None:
    """What is computed in float64 stays so."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4).float(), nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x.to(self.first.weight.dtype)).double())

    model = Model()
    x = batch(4, 3).float()
    gramian = Engine(model).compute_gramian(per_sample(model(x)))
    assert gramian.dtype == torch.float64
    assert relative_error(gramian, exact(model, x)) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("losses_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_losses_in_another_dtype(dtype: torch.dtype, losses_dtype: torch.dtype) -> None:
    """The result has the dtype of the parameters, and at least float32."""
    model = mlp().to(dtype)
    x = batch(4, 3).to(dtype)
    gramian = Engine(model).compute_gramian(per_sample(model(x).to(losses_dtype)))
    assert gramian.dtype == torch.promote_types(dtype, torch.float32)
    rounded = torch.bfloat16 in (dtype, losses_dtype)
    tolerance = TOLERANCES[torch.bfloat16 if rounded else torch.float32]
    assert relative_error(gramian, exact(model, x)) < tolerance


def test_result_for_losses_without_a_gradient_has_the_same_dtype() -> None:
    """Zeros are no exception."""
    model = mlp().bfloat16()
    engine = Engine(model)
    gramian = engine.compute_gramian(per_sample(model(batch(4, 3).bfloat16())) * 0)
    assert gramian.dtype == torch.float32


def test_empty_result_has_the_same_dtype() -> None:
    """No objectives are no exception either."""
    model = mlp().bfloat16()
    engine = Engine(model)
    assert engine.compute_gramian(model(batch(0, 3).bfloat16())).dtype == torch.float32


class PartlyAutocast(nn.Module):
    """A weight used twice under autocast, once more outside of it, and a region without it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            y = self.shared(self.shared(x).tanh())
            with torch.autocast(DEVICE, enabled=False):
                y = self.shared(y.float()).tanh()
            return self.last(y)


@pytest.mark.parametrize("each", [1, 2])
def test_autocast_of_a_part(each: int) -> None:
    """Casts that autocast caches are one and the same for several uses."""
    model = PartlyAutocast().float()
    engine = Engine(model)
    losses = _losses(model(batch(5, 4).float()).float(), each)
    assert_as_rounded(engine, losses, model, torch.bfloat16)


# --- Scaled losses --------------------------------------------------------------------------------


def scaled_losses(model: nn.Module, x: Tensor, size: float) -> Tensor:
    """Losses of some size, computed under autocast to float16."""
    with torch.autocast(DEVICE, dtype=torch.float16):
        output = model(x)
    return per_sample(output.float()) * size


@pytest.mark.parametrize(("scale", "is_exact"), [(1, False), (2.0**16, True), (2.0**24, True)])
def test_scaling_keeps_small_cotangents(scale: float, is_exact: bool) -> None:
    """Below 6e-8, float16 has no numbers; a power of two changes nothing else.

    An ordinary backward pass loses as much, but not the same, which a verification would tell.
    """
    model = mlp(6, 3).float()
    x = batch(8, 6).float()
    engine = Engine(model, verify="first" if is_exact else "never")
    scaler = torch.amp.GradScaler(DEVICE, init_scale=scale)
    losses = scaled_losses(model, x, 1e-7)
    gramian = engine.compute_gramian(scaler.scale(losses)).double() / scale**2
    twin = copy.deepcopy(model).double()
    jacobian = reference_jacobian(per_sample(twin(x.double())) * 1e-7, trainable(twin))
    error = relative_error(gramian, jacobian @ jacobian.T)
    assert (error < TOLERANCES[torch.float16]) == is_exact


def test_scaled_losses_beside_unscaled_ones() -> None:
    """Where nothing under- or overflows, their Gramians differ by the square of the scale."""
    model = mlp().float()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3).float()))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8)
    scaled = engine.compute_gramian(scaler.scale(losses))
    assert_close_to_reference(scaled, engine.compute_gramian(losses) * 2.0**16)
