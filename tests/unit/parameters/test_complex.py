"""Complex numbers: weights made of real parameters, and parameters that are complex themselves."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import Engine
from autogram.testing import check_rule, reference_jacobian
from tests.unit._capture.seen import left_to_fallback, seen_uses
from tests.unit._compiled.compiling import compiled
from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SECOND,
    SEVERAL,
    Objectives,
    assert_close_to_reference,
    assert_gramian_is_exact,
    in_real,
    irregular,
    trainable,
)
from tests.unit.engines import assert_exact, batch, per_sample
from tests.unit.jacobians import assert_jacobian_is_exact
from tests.unit.series import assert_series_is_exact

WIDTH = 4


class Waves(nn.Module):
    """A function of complex activations and of weights, between real ones.

    Args:
        function: Takes activations ``(n, 3, 4)`` and the weights, complex.
        shapes: Those of the weights.
        are_complex: Whether the parameters are complex, or real with a last dimension of two.
    """

    def __init__(self, function: Callable[..., Tensor], shapes: Any, *, are_complex: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 2 * WIDTH)
        weights = [torch.view_as_complex(torch.randn(*shape, 2)) for shape in shapes]
        self.weights = nn.ParameterList(weights if are_complex else map(in_real, weights))
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Maps samples ``(n, 3, 5)`` to samples."""
        activations = torch.view_as_complex(self.first(x).unflatten(-1, (WIDTH, 2)))
        weights = [w if w.is_complex() else torch.view_as_complex(w) for w in self.weights]
        return in_real(self._function(activations, *weights)).flatten(1)


def fourier(z: Tensor, w: Tensor) -> Tensor:
    """A layer of a Fourier neural operator: a matrix for each frequency along the positions."""
    return torch.fft.ifft(torch.einsum("bxi,xio->bxo", torch.fft.fft(z, dim=1), w), dim=1)


def convolution(z: Tensor, w: Tensor) -> Tensor:
    """A long convolution, whose filter is computed from parameters and transformed."""
    kernel = torch.fft.rfft(w.real.exp() * w.imag.cos(), n=8)
    return torch.fft.irfft(torch.fft.rfft(z.real, n=8) * kernel, n=8)[..., :WIDTH]


def unitary(z: Tensor, w: Tensor) -> Tensor:
    """A state that is turned by a learned angle in each step."""
    states = [z[:, 0]]
    for t in (1, 2):
        states.append(states[-1] * torch.exp(-w.real.square() + 1j * w.imag) + z[:, t])
    return torch.stack(states, 1)


def tied(z: Tensor, w: Tensor) -> Tensor:
    """There and back by the adjoint."""
    return (z @ w).sin() @ w.mH


def in_place(z: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = z * 2
    y *= w
    y += v
    return y.sub_(v.conj(), alpha=0.5).div_(w)


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "a product": (lambda z, w: z @ w, [(4, 3)]),
    "the conjugate": (lambda z, w: z @ w.conj(), [(4, 3)]),
    "the adjoint": (lambda z, w: z @ w.mH, [(3, 4)]),
    "of the conjugate": (lambda z, w: z.conj() @ w, [(4, 3)]),
    "a part": (lambda z, w: z @ w.T[1:5, :3], [(4, 6)]),
    "a layer": (F.linear, [(3, 4), (3,)]),
    "three factors": (lambda z, w, v: torch.einsum("bti,io,ti->bto", z, w, v), [(4, 2), (3, 4)]),
    "batched factors": (
        lambda z, w: torch.einsum("bti,io,bti->bto", z, w, z.sin()),
        [(4, 2)],
    ),
    "real activations": (lambda z, w: z.real @ w.real + z.imag * w[0, 0], [(4, 4)]),
    "a real factor": (lambda z, w: z.real * w, [(4,)]),
    "by element": (lambda z, w, v: (z * w - v) / w.exp() + v / (z + 5), [(3, 1), (4,)]),
    "by parts": (lambda z, w: z * w.real + z.conj() * w.imag, [(4,)]),
    "a modulus": (lambda z, w: z * w.abs() + w.angle(), [(4,)]),
    "to a power": (lambda z, w: (z + 3) ** w, [(4,)]),
    "joined": (lambda z, w: torch.cat([z, w.expand(len(z), 3, 1)], 2), [(3, 1)]),
    "selected": (lambda z, w: torch.where(z.real > 0, z, w), [(4,)]),
    "in place": (in_place, [(4,), (3, 1)]),
    "added": (
        lambda z, w, v: torch.baddbmm(v, z, w.expand(len(z), 4, 3), beta=2, alpha=0.5),
        [(4, 3), (1, 1, 3)],
    ),
    "complex multiples": (
        lambda z, w, v: (
            torch.add(z, v, alpha=1j) - torch.baddbmm(v, z, w.expand(len(z), 4, 4), beta=2j)
        ),
        [(4, 4), (1, 1, 4)],
    ),
    "tensordot": (lambda z, w: torch.tensordot(z, w, ([1, 2], [0, 2])), [(3, 2, 4)]),
    "fourier": (fourier, [(3, 4, 2)]),
    "convolution": (convolution, [(4,)]),
    "unitary": (unitary, [(4,)]),
    "tied": (tied, [(4, 4)]),
}
ARE_COMPLEX = pytest.mark.parametrize("are_complex", [False, True], ids=["pairs", "complex"])
NAMES = pytest.mark.parametrize("name", CASES)


def model_of(name: str, *, are_complex: bool) -> Waves:
    return Waves(*CASES[name], are_complex=are_complex)


@ARE_COMPLEX
@NAMES
@pytest.mark.parametrize("objectives", [PER_SAMPLE, SEVERAL, SECOND, COUPLED], ids=repr)
def test_gramian(name: str, are_complex: bool, objectives: Objectives) -> None:
    make = partial(model_of, name, are_complex=are_complex)
    assert_gramian_is_exact(make, batch(6, 3, 5), objectives=objectives)


@ARE_COMPLEX
@NAMES
def test_products_with_the_jacobian(name: str, are_complex: bool) -> None:
    make = partial(model_of, name, are_complex=are_complex)
    assert_jacobian_is_exact(make, batch(4, 3, 5))
    assert_jacobian_is_exact(make, batch(4, 3, 5), objectives=SEVERAL, keep="factors")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_direction_of_real_numbers(dtype: torch.dtype) -> None:
    """It has no imaginary part."""
    model = nn.Linear(2, 2, bias=False, dtype=torch.complex128)  # a pair of numbers is as long
    jacobian = Engine(model).jacobian(model(batch(4, 2) + 0j).abs().square().sum(1))
    direction = torch.tensor([[1.0, -2.0], [3.0, 5.0]]).to(dtype)
    assert_close_to_reference(jacobian.jvp([direction]), jacobian.jvp([direction + 0j]))


@ARE_COMPLEX
@NAMES
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_series_of_steps(name: str, are_complex: bool, fused: bool) -> None:
    """With other numbers of samples, without a fallback."""
    model = model_of(name, are_complex=are_complex)
    inputs = [batch(n, 3, 5) for n in (4, 6, 3)]
    with seen_uses() as uses:
        assert_series_is_exact(
            lambda x: per_sample(model(x)), [model], inputs, batch_dim=0, fused=fused
        )
    assert uses
    assert not left_to_fallback(uses)


@ARE_COMPLEX
@NAMES
def test_in_a_checkpoint(name: str, are_complex: bool) -> None:
    model = model_of(name, are_complex=are_complex)
    engine = Engine(model, verify="never")
    for samples in (4, 4, 3):
        losses = per_sample(checkpoint(model, batch(samples, 3, 5), use_reentrant=False))
        assert_exact(engine, losses, model)


@pytest.mark.cpu
@ARE_COMPLEX
@NAMES
def test_compiled(name: str, are_complex: bool) -> None:
    model = model_of(name, are_complex=are_complex)
    engine, run = Engine(model, verify="never"), compiled(model)
    for _ in range(3):
        assert_exact(engine, per_sample(run(batch(4, 3, 5))), model)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_training(dtype: torch.dtype) -> None:
    """Gradients are complex, as those of a backward pass, and an optimizer takes them."""
    torch.set_default_dtype(dtype.to_real())
    model, twin = model_of("fourier", are_complex=True), model_of("fourier", are_complex=True)
    twin.load_state_dict(model.state_dict())
    engine = Engine(model)
    optimizers = [torch.optim.Adam(x.parameters(), lr=0.1) for x in (model, twin)]
    for samples in (4, 4, 6, 3, 4):
        x, weights = batch(samples, 3, 5).to(model.first.weight), irregular(samples)
        for optimizer in optimizers:
            optimizer.zero_grad()
        engine.backward(per_sample(model(x)), lambda gramian, w=weights: w.to(gramian))
        losses = per_sample(twin(x))
        losses.backward(weights.to(losses))
        for parameter, other in zip(trainable(model), trainable(twin), strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            assert_close_to_reference(in_real(parameter.grad), in_real(other.grad))
        for optimizer in optimizers:
            optimizer.step()


def test_as_of_pairs() -> None:
    """Complex parameters have the Gramian, sketch and accumulated gradients of real pairs."""
    models = [model_of("fourier", are_complex=are_complex) for are_complex in (True, False)]
    for parameter, other in zip(*(model.parameters() for model in models), strict=True):
        other.data = in_real(parameter.data)
    x, weights, found = batch(6, 3, 5), irregular(6), []
    for model in models:
        engine = Engine(model)
        losses = per_sample(model(x))
        results = [engine.compute_gramian(losses), engine.sketch(losses, 64, seed=1).gramian()]
        with engine.accumulate(lambda _: weights) as steps:
            for part in x.split(2):
                steps.add(per_sample(model(part)))
        found.append([*results, *[in_real(p.grad) for p in trainable(model) if p.grad is not None]])
    for ours, pairs in zip(*found, strict=True):
        assert_close_to_reference(ours, pairs)


def test_a_step_along_a_gradient() -> None:
    """The Gramian tells by how much a small step along one gradient changes each loss."""
    model = model_of("a product", are_complex=True)
    x, step = batch(3, 3, 5), 1e-7
    jacobian = Engine(model).jacobian(per_sample(model(x)))
    gradients, before = jacobian.rows(1), per_sample(model(x))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= step * gradients[name][0]
        change = (before - per_sample(model(x))) / step
    assert float((change - jacobian.gramian()[1]).abs().max() / change.abs().max()) < 1e-4


def test_a_parameter_without_a_part() -> None:
    """Its columns are zeros, in its own numbers."""
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2, dtype=torch.complex128)])
    jacobian = Engine(model).jacobian(per_sample(model[0](batch(4, 3))))
    assert jacobian.shape == (4, 8 + 16)
    assert jacobian.vjp(irregular(4))["1.weight"].dtype == torch.complex128
    assert jacobian.rows([0, 2])["1.bias"].dtype == torch.complex128
    assert jacobian.dense().dtype == torch.float64


def test_a_parameter_outside_of_its_module() -> None:
    """A penalty, whose rows are explicit."""
    model = model_of("a product", are_complex=True)
    engine = Engine(model, verify="never")
    for samples in (4, 3):
        losses = per_sample(model(batch(samples, 3, 5)))
        losses = losses + irregular(samples) * model.weights[0].abs().square().sum()
        with pytest.warns(match="explicit rows") if samples == 4 else nullcontext():
            gramian = engine.compute_gramian(losses)
        jacobian = reference_jacobian(losses, trainable(model))
        assert_close_to_reference(gramian, jacobian @ jacobian.T)


@pytest.mark.parametrize("is_weight_complex", [False, True])
def test_rules(is_weight_complex: bool) -> None:
    """Row by row, with samples in each dimension."""
    dtype = torch.complex128 if is_weight_complex else torch.float64
    z = torch.randn(4, 6, 3, dtype=torch.complex128)
    weight = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    vector = torch.randn(6, 1, dtype=dtype, requires_grad=True)
    if is_weight_complex:  # torch asks for one dtype
        check_rule(torch.matmul, z, weight)
        check_rule(F.linear, z, weight.detach().T.contiguous().requires_grad_())
        check_rule(torch.einsum, "bti,io,bti->bto", z, weight, z.sin())
    for function in (torch.mul, torch.add, torch.sub, torch.div):
        check_rule(function, z, vector)
        check_rule(function, vector, z)
