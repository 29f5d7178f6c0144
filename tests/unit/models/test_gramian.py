"""The Gramian of the usual losses of whole models, in training mode, against plain autograd.

Warnings are errors in this suite, so these tests also assert that the engine treats the losses as
losses of samples: it warns when it has to take the slower way of coupled objectives.
"""

from typing import Literal

import pytest

from autogram import Engine
from tests.unit.engines import assert_exact, assert_nothing_is_left

from .zoo import SPECIMENS, Attention

CASES = [
    pytest.param(name, attention, size, batch_dim, id=f"{name}-{attention}-{size}-{batch_dim}")
    for name, specimen in SPECIMENS.items()
    for attention in specimen.attentions
    for size in specimen.sizes
    for batch_dim in ("auto", 0)
]
BOTH = [
    pytest.param(name, attention, id=f"{name}-{attention}")
    for name, specimen in SPECIMENS.items()
    for attention in specimen.attentions
]


@pytest.mark.parametrize(("name", "attention", "batch_size", "batch_dim"), CASES)
def test_gramian_equals_autograd(
    name: str, attention: Attention, batch_size: int, batch_dim: Literal["auto"] | int
) -> None:
    """Any number of samples, also as many as tokens or windows."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(attention)
    engine = Engine(model, batch_dim=batch_dim)
    losses = specimen.compute_losses(model, specimen.make_batch(batch_size))
    assert_exact(engine, losses, model)
    assert_nothing_is_left(model.parameters())


@pytest.mark.parametrize(("name", "attention"), BOTH)
def test_batches_of_different_sizes_in_a_row(name: str, attention: Attention) -> None:
    """One engine on batches of changing size: what was learnt from one must not hurt the next."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(attention)
    engine = Engine(model)
    for batch_size in (*specimen.sizes, *reversed(specimen.sizes)):
        losses = specimen.compute_losses(model, specimen.make_batch(batch_size))
        assert_exact(engine, losses, model)


@pytest.mark.parametrize("name", SPECIMENS)
def test_gramian_in_evaluation_mode(name: str) -> None:
    """Without dropout, models and `nn.MultiheadAttention` may take other ways through the code."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1]).eval()
    engine = Engine(model)
    losses = specimen.compute_losses(model, specimen.make_batch(specimen.sizes[-1]))
    assert_exact(engine, losses, model)


@pytest.mark.parametrize("name", SPECIMENS)
def test_gramian_of_two_forward_passes(name: str) -> None:
    """Losses of two passes over one batch, added per sample: all cross terms are in the Gramian."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1])
    engine = Engine(model)
    batch = specimen.make_batch(specimen.sizes[1])
    losses = specimen.compute_losses(model, batch) + specimen.compute_losses(model, batch)
    assert_exact(engine, losses, model)
