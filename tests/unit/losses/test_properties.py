"""Random networks, and series of steps: every product with the Jacobian is that of plain autograd.

``make fuzz`` tries many more of them, and other ones each time.
"""

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor

from autogram import Engine, MixedSamplesError, VerificationError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, irregular, trainable
from tests.unit.grammar import LOSSES, Case, Network, Series, Step, cases, series
from tests.unit.jacobians import flat

EXAMPLES = int(os.environ.get("AUTOGRAM_FUZZ_EXAMPLES", "0"))


def drawn(examples: int) -> settings:
    """So many examples, always the same, or others each time and as many as are asked for."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def _vjp(engine: Engine, losses: Tensor) -> Tensor:
    """For weights without a pattern, all parameters in a row."""
    return flat(engine.jacobian(losses).vjp(irregular(losses.numel())))


def _jvp(engine: Engine, losses: Tensor) -> Tensor:
    """Along a direction without a pattern, over all parameters in a row."""
    jacobian = engine.jacobian(losses)
    shapes = {name: x.shape for name, x in jacobian.vjp(torch.ones(losses.numel())).items()}
    parts = irregular(jacobian.shape[1]).split([shape.numel() for shape in shapes.values()])
    return jacobian.jvp({name: x.view(shapes[name]) for name, x in zip(shapes, parts, strict=True)})


# What an engine computes of some losses, and the same from the explicit Jacobian, (m, n).
PRODUCTS: dict[str, tuple[Callable[[Engine, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gramian": (Engine.compute_gramian, lambda jacobian: jacobian @ jacobian.T),
    "row_norms": (
        lambda engine, losses: engine.jacobian(losses).row_norms(),
        lambda jacobian: jacobian.norm(dim=1),
    ),
    "jvp": (_jvp, lambda jacobian: jacobian @ irregular(jacobian.shape[1])),
    "vjp": (_vjp, lambda jacobian: irregular(len(jacobian)) @ jacobian),
}


@pytest.mark.slow
@drawn(100)
@given(cases())
def test_products_equal_plain_autograd(case: Case) -> None:
    """At the first call and at the second, and gradients stay what they are."""
    model, plain = case.model(), case.model()
    expected_losses = losses_of(case, plain)
    assume(bool(expected_losses.isfinite().all()) and expected_losses.requires_grad)
    jacobian = reference_jacobian(expected_losses, trainable(plain))
    assume(bool(jacobian.abs().max() > 1e-6))  # or all of it is rounding errors

    engine = Engine(model, batch_dim=case.batch_dim, memory_limit_bytes=case.memory_limit_bytes)
    losses = losses_of(case, model)
    assert torch.equal(losses, expected_losses)
    try:
        assert_products_are_exact(engine, losses, jacobian, model)
    except (AssertionError, MixedSamplesError, VerificationError):
        # Or what plain autograd gives is made of rounding errors, too.
        assume(not is_ill_conditioned(case, plain, None, jacobian))
        raise


def assert_products_are_exact(
    engine: Engine, losses: Tensor, jacobian: Tensor, model: Network
) -> None:
    """Assert that every product, and an ordinary gradient, is that of the explicit Jacobian."""
    for product, expected in PRODUCTS.values():
        assert_close_to_reference(product(engine, losses), expected(jacobian))
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
    # Not bit for bit: a call without a rule that reads a parameter several times, as a recurrent
    # layer does, adds these gradients up before those of other calls.
    gradients = torch.autograd.grad(
        losses.sum(), trainable(model), allow_unused=True, materialize_grads=True
    )
    total = torch.cat([gradient.flatten() for gradient in gradients])
    assert float((total - jacobian.sum(0)).abs().max() / jacobian.abs().max()) < 1e-10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@drawn(120)
@given(series())
def test_series_equal_plain_autograd(series: Series) -> None:
    """With one engine, while shapes, arguments, masks, modes, frozen parts and losses change."""
    case = series.case
    model, plain = case.model(), case.model()
    engine = Engine(
        model,
        batch_dim=case.batch_dim,
        memory_limit_bytes=case.memory_limit_bytes,
        verify="first" if series.is_verified else "never",
    )
    compared = 0
    for step in series.steps:
        model.begin(step)
        plain.begin(step)
        losses, expected_losses = (losses_of(case, each, step) for each in (model, plain))
        if not expected_losses.requires_grad or not bool(expected_losses.isfinite().all()):
            continue
        assert torch.equal(losses, expected_losses)
        jacobian = reference_jacobian(expected_losses, trainable(plain))
        if not bool(jacobian.abs().max() > 1e-6):  # all of it is rounding errors
            continue
        try:
            assert_call_is_exact(engine, losses, jacobian, model, step)
        except MixedSamplesError:
            if case.batch_dim is None or case.batch_dim == "auto":
                raise
        except (AssertionError, VerificationError):
            if not is_ill_conditioned(case, plain, step, jacobian):
                raise
            continue  # what plain autograd gives is made of rounding errors, too
        compared += 1
    assume(compared > 1)


def assert_call_is_exact(
    engine: Engine, losses: Tensor, jacobian: Tensor, model: Network, step: Step
) -> None:
    """Assert that what a step calls gives what plain autograd gives."""
    if step.call == "products":
        for product, expected in PRODUCTS.values():
            assert_close_to_reference(product(engine, losses), expected(jacobian))
        return
    if step.call == "gramian":
        gramian = engine.compute_gramian(losses)
    else:
        weights = irregular(len(jacobian))
        model.zero_grad()
        _, gramian = engine.backward(losses, lambda _: weights, return_gramian=True)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
        found = torch.cat([gradient.flatten() for gradient in gradients])
        error = (found - weights @ jacobian).abs().max() / jacobian.abs().max()
        assert float(error) < 1e-10
    assert_close_to_reference(gramian, jacobian @ jacobian.T)


def is_ill_conditioned(case: Case, plain: Network, step: Step | None, jacobian: Tensor) -> bool:
    """Whether the Jacobian is another one for parameters that are larger by some rounding errors.

    So it is behind a norm of numbers that are equal but for rounding errors.
    """
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter *= 1 + 1e-14
    found = reference_jacobian(losses_of(case, plain, step), trainable(plain))
    return float((found - jacobian).abs().max() / jacobian.abs().max()) > 1e-11


def losses_of(case: Case, model: Network, step: Step | None = None) -> Tensor:
    """The losses of one forward pass, with equal random numbers."""
    torch.manual_seed(1)
    losses = LOSSES[case.losses if step is None else step.losses][0]
    return losses(model, model(case.inputs(step)))
