"""The zoo and the checks are themselves able to fail."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import (
    TOLERANCES,
    assert_close_to_reference,
    assert_same_gradients,
    trainable,
)
from tests.unit.engines import assert_exact, assert_nothing_is_left
from tests.unit.environment import ADDS_UP_IN_ORDER, LAST_BITS

from .zoo import GPT2, SPECIMENS


@pytest.mark.parametrize("name", SPECIMENS)
def test_every_parameter_shows_in_the_gramian(name: str) -> None:
    """A Gramian that leaves out a parameter misses by far more than the tolerance.

    Unless no loss depends on it: then the zoo says so.
    """
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[0])
    losses = specimen.compute_losses(model, specimen.make_batch(specimen.sizes[-1]))
    jacobian = reference_jacobian(losses, trainable(model))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = [parameter.numel() for parameter in named.values()]
    for parameter_name, share in zip(named, jacobian.split(sizes, dim=1), strict=True):
        error = (share @ share.T).abs().max() / (jacobian @ jacobian.T).abs().max()
        is_visible = bool(error > 100 * TOLERANCES[torch.float64])
        assert is_visible != parameter_name.endswith(specimen.invisible or ("none",)), (
            parameter_name
        )


@pytest.mark.parametrize("name", SPECIMENS)
def test_dropout_is_active(name: str) -> None:
    """Two passes over one batch give different losses, unless the zoo says that they do not."""
    specimen = SPECIMENS[name]
    model, batch = specimen.make_model(specimen.attentions[0]), specimen.make_batch(3)
    first, second = (specimen.compute_losses(model, batch) for _ in range(2))
    assert specimen.is_random != torch.isclose(first, second).all()


@pytest.mark.parametrize(
    "name", [name for name, item in SPECIMENS.items() if len(item.attentions) == 2]
)
def test_implementations_of_attention_differ(name: str) -> None:
    """The option reaches the model, or one of the two would be tested twice."""
    specimen = SPECIMENS[name]
    for attention in specimen.attentions:
        assert specimen.make_model(attention).config._attn_implementation == attention


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "mamba", "roberta", "t5", "bart"])
def test_output_layer_is_tied_to_the_embedding(name: str) -> None:
    """Weight tying survives the conversion to float64."""
    model = SPECIMENS[name].make_model("eager")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_wrong_gramian_is_refused() -> None:
    """An error of one part in a million in one entry is seen."""
    model = nn.Linear(3, 1).double()
    losses = model(torch.randn(4, 3, dtype=torch.float64)).square().squeeze(1)
    jacobian = reference_jacobian(losses, trainable(model))
    expected = jacobian @ jacobian.T
    gramian = expected.clone()
    assert_close_to_reference(gramian, expected)
    gramian[0, 1] += 1e-6 * gramian.max()
    with pytest.raises(AssertionError, match="relative error"):
        assert_close_to_reference(gramian, expected)


def test_parameters_that_an_engine_leaves_out_are_seen() -> None:
    """An engine on a part of a model has not the Gramian of the whole model."""
    model = GPT2.make_model("eager")
    engine = Engine(model.transformer.h)
    losses = GPT2.compute_losses(model, GPT2.make_batch(2))
    assert_exact(engine, losses, model.transformer.h)
    with pytest.raises(AssertionError, match="relative error"):
        assert_exact(engine, losses, model)


def test_different_gradients_are_refused() -> None:
    """One last bit in one gradient is seen, and so is a missing gradient."""
    model = GPT2.make_model("eager")
    twin = deepcopy(model)
    GPT2.compute_losses(model, GPT2.make_batch(2)).sum().backward()
    with pytest.raises(AssertionError):
        assert_same_gradients(model, twin)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = parameter.grad.clone()
    assert_same_gradients(model, twin)
    last = trainable(twin)[-1].grad
    bits = 1 if ADDS_UP_IN_ORDER else 8 * LAST_BITS
    for _ in range(bits):
        last.copy_(torch.nextafter(last, last + 1))
    with pytest.raises(AssertionError):
        assert_same_gradients(model, twin)


def test_accumulated_gradients_are_refused() -> None:
    """A gradient on one parameter is seen."""
    model = nn.Linear(2, 2)
    assert_nothing_is_left(model.parameters())
    model.bias.grad = torch.zeros(2)
    with pytest.raises(AssertionError):
        assert_nothing_is_left(model.parameters())
