"""Adapters cost what their own parameters cost: the frozen model has no uses and no blocks."""

from collections import Counter

import pytest
import torch

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, irregular, trainable
from tests.unit.engines import assert_exact
from tests.unit.jacobians import assert_operator_is

from .survey import calls_of
from .zoo import ADAPTERS

# Three modules in each layer of GPT-2, two in each of BERT's, and the classifier behind it. DoRA
# multiplies the outputs of both branches by its magnitudes.
USES = {
    "gpt2-lora": {"linear": 12},
    "gpt2-dora": {"linear": 12, "mul": 12},
    "gpt2-prompt": {"repeat": 1},
    "llama-lora": {"embedding": 1, "matmul": 1, "linear": 4},
    "bert-lora": {"linear": 8 + 1},
    "bert-dora": {"linear": 8 + 1, "mul": 8},
    "bert-prompt": {"repeat": 1, "linear": 1},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_only_adapters_are_used(name: str) -> None:
    """As many calls as the adapters need, and columns for their parameters alone."""
    specimen = ADAPTERS[name]
    model = specimen.make_model("sdpa")
    engine = Engine(model)
    engine.compute_gramian(specimen.compute_losses(model, specimen.make_batch(3)))
    assert Counter(function for function, *_ in calls_of(engine)) == USES[name]
    with_columns = {of.name for of in engine.report().parameters}
    assert with_columns == {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(with_columns) < len(list(model.parameters())) / 2


@pytest.mark.parametrize("name", [name for name in ADAPTERS if "prompt" not in name])
def test_fresh_adapters(name: str) -> None:
    """At first one factor of each product is zero, and so are all cotangents of the other."""
    specimen = ADAPTERS[name]
    model = specimen.make_model("sdpa")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name or "lora_embedding_A" in parameter_name:
                parameter.zero_()
    engine = Engine(model)
    optimizer = torch.optim.SGD(trainable(model), 0.1)
    for _ in range(3):
        losses = specimen.compute_losses(model, specimen.make_batch(3))
        assert_exact(engine, losses, model)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["gpt2-lora", "bert-dora"])
def test_disabled_adapters(name: str) -> None:
    """Without its adapters a model has none of their parameters, and then has them again."""
    specimen = ADAPTERS[name]
    model = specimen.make_model("sdpa")
    engine = Engine(model)
    batch = specimen.make_batch(3)
    with model.disable_adapter():
        losses = specimen.compute_losses(model, batch)
    if losses.requires_grad:  # by the head, which is trained beside the adapters
        engine.compute_gramian(losses)
        assert not any("lora" in of.name for of in engine.report().parameters)
    assert_exact(engine, specimen.compute_losses(model, batch), model)


def test_adapters_of_embeddings() -> None:
    """Their first factor is read by its last dimension."""
    specimen = ADAPTERS["llama-lora"]
    model = specimen.make_model("sdpa")
    assert any("lora_embedding_A" in name for name, p in model.named_parameters())
    engine = Engine(model)
    for size in specimen.sizes:
        losses = specimen.compute_losses(model, specimen.make_batch(size))
        expected = reference_jacobian(losses, trainable(model))
        assert_operator_is(engine.jacobian(losses), expected)
        weights = irregular(size)
        engine.backward(losses, lambda _, w=weights: w)
        gradient = torch.cat([p.grad.flatten() for p in trainable(model)])
        assert_close_to_reference(gradient, weights @ expected)
        model.zero_grad()
