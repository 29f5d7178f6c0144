"""The Gramian of the usual losses of whole models, in training mode, against plain autograd.

Warnings are errors in this suite, so these tests also assert that the engine treats the losses as
losses of samples: it warns when it has to take the slower way of coupled objectives.
"""

import pytest
import torch

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import trainable
from tests.unit.engines import assert_exact, assert_nothing_is_left

from .text import TOKENS, next_token_losses
from .zoo import GEMMA, MAMBA, SPECIMENS, Attention, Specimen

CASES = [
    pytest.param(name, attention, size, id=f"{name}-{attention}-{size}")
    for name, specimen in SPECIMENS.items()
    for attention in specimen.attentions
    for size in specimen.sizes[2 if attention == specimen.attentions[-1] else 1 :][:1]
]


@pytest.mark.parametrize(("name", "attention", "batch_size"), CASES)
def test_gramian_equals_autograd(name: str, attention: Attention, batch_size: int) -> None:
    """With as many samples as tokens or windows; other numbers are those of the next test."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(attention)
    engine = Engine(model)
    losses = specimen.compute_losses(model, specimen.make_batch(batch_size))
    assert_exact(engine, losses, model)
    assert_nothing_is_left(model.parameters())
    report = engine.report()
    assert report.flops > 0
    assert {of.name for of in report.parameters}.isdisjoint(report.uncovered)
    assert all(of.name in str(report) for of in report.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIMENS)
def test_batches_of_different_sizes_in_a_row(name: str) -> None:
    """One engine on batches of changing size: what was learnt from one must not hurt the next."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1])
    engine = Engine(model)
    for batch_size in (*specimen.sizes, specimen.sizes[0]):
        losses = specimen.compute_losses(model, specimen.make_batch(batch_size))
        assert_exact(engine, losses, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIMENS)
def test_gramian_in_evaluation_mode(name: str) -> None:
    """Without dropout, models and `nn.MultiheadAttention` may take other ways through the code."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1]).eval()
    engine = Engine(model)
    losses = specimen.compute_losses(model, specimen.make_batch(specimen.sizes[-1]))
    assert_exact(engine, losses, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIMENS)
def test_gramian_of_two_forward_passes(name: str) -> None:
    """Losses of two passes over one batch, added per sample: all cross terms are in the Gramian."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1])
    engine = Engine(model)
    batch = specimen.make_batch(specimen.sizes[1])
    losses = specimen.compute_losses(model, batch) + specimen.compute_losses(model, batch)
    assert_exact(engine, losses, model)


@pytest.mark.parametrize(
    "specimen", [pytest.param(GEMMA, id="gemma"), pytest.param(MAMBA, id="mamba")]
)
def test_models_that_read_parameters_in_float32(specimen: Specimen) -> None:
    """As the models are: their norms, or their recurrence, are computed in float32 at any rate.

    A sum over the tokens is then rounded by 2^-24 of itself for each of them, on either side, and a
    product of two such sums by twice that.
    """
    model = specimen.make_model("eager")
    engine = Engine(model)
    losses = next_token_losses(model, specimen.make_batch(4))
    gramian = engine.compute_gramian(losses)
    jacobian = reference_jacobian(losses, trainable(model))
    expected = jacobian @ jacobian.T
    assert gramian.dtype == expected.dtype == torch.float64
    assert (gramian - expected).abs().max() < 4 * TOKENS * 2**-24 * expected.abs().max()
