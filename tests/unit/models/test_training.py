"""What surrounds the Gramian when a whole model is trained: backward passes, frozen parts."""

from copy import deepcopy
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from autogram import Engine, UnsupportedError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, assert_same_gradients, trainable
from tests.unit.engines import assert_exact, assert_nothing_is_left

from .zoo import BERT, GPT2, MHA, SPECIMENS, SWIN, VIT, Batch, Specimen

pytestmark = pytest.mark.slow


def seeded_losses(specimen: Specimen, model: nn.Module, batch: Batch) -> Tensor:
    """Losses with the same dropout at each call."""
    torch.manual_seed(1)
    return specimen.compute_losses(model, batch)


@pytest.mark.parametrize("name", SPECIMENS)
def test_gradients_are_those_of_a_model_without_engine(name: str) -> None:
    """Bit for bit: neither the recording nor the Gramian touches the ordinary backward pass."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1])
    twin = deepcopy(model)
    engine = Engine(model)
    batch = specimen.make_batch(specimen.sizes[1])

    losses = seeded_losses(specimen, model, batch)
    expected_losses = seeded_losses(specimen, twin, batch)
    assert torch.equal(losses, expected_losses)

    weights = torch.rand_like(losses)
    engine.compute_gramian(losses)
    losses.backward(weights)
    expected_losses.backward(weights)
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("name", ["gpt2", "mamba", "mixtral", "bert-dora", "t5", "mha", "resnet"])
def test_steps_are_those_of_a_model_without_engine(name: str) -> None:
    """After three steps of a whole training loop the parameters agree bit for bit."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1])
    twin = deepcopy(model)
    engine = Engine(model)
    batch = specimen.make_batch(specimen.sizes[1])

    for trained in (model, twin):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(3):
            losses = seeded_losses(specimen, trained, batch)
            if trained is model:
                engine.compute_gramian(losses)
            losses.backward(torch.full_like(losses, 1 / losses.numel()))
            optimizer.step()
            optimizer.zero_grad()

    for (parameter_name, parameter), other in zip(
        model.named_parameters(), twin.parameters(), strict=True
    ):
        assert torch.equal(parameter, other), parameter_name


CHECKPOINTED = [
    name
    for name in SPECIMENS
    # Four have no checkpoints to enable; the others are once more what stands before the hyphen.
    if not name.startswith(("albert", "convnext", "resnet", "mha"))
    and not name.endswith(("-padded", "-masked", "-tasks", "-stacked"))
]


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gramian_with_checkpointing(name: str) -> None:
    """Blocks that run again in the backward pass, with the same dropout; as is the default."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1])
    model.activation_checkpointing_enable()
    engine = Engine(model)
    with mock.patch.object(Tensor, "float", Tensor.double):  # in the second run, too
        losses = specimen.compute_losses(model, specimen.make_batch(specimen.sizes[1]))
        assert_exact(engine, losses, model)


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "swin", "wav2vec2", "bert-lora"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_reentrant_checkpointing_is_refused(name: str) -> None:
    """The error says what to pass to transformers."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1])
    model.activation_checkpointing_enable({"use_reentrant": True})
    engine = Engine(model)
    with pytest.raises(UnsupportedError, match="`gradient_checkpointing_kwargs`"):
        specimen.compute_losses(model, specimen.make_batch(3))
    assert engine is not None


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_former_name_of_checkpointing() -> None:
    """What transformers 5 has renamed does the same."""
    model = GPT2.make_model("sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = Engine(model)
    assert_exact(engine, GPT2.compute_losses(model, GPT2.make_batch(4)), model)


@pytest.mark.parametrize("name", ["gpt2", "t5", "mamba", "mixtral", "swin", "wav2vec2"])
def test_gramian_with_tensors_on_the_cpu(name: str) -> None:
    """Saved tensors that are off-loaded."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1])
    engine = Engine(model)
    with save_on_cpu():
        losses = specimen.compute_losses(model, specimen.make_batch(specimen.sizes[1]))
    assert_exact(engine, losses, model)


FROZEN = [
    pytest.param(GPT2, "transformer.wte", id="gpt2-tied-embedding"),
    pytest.param(GPT2, "transformer.h", id="gpt2-blocks"),
    pytest.param(BERT, "bert.embeddings", id="bert-embeddings"),
    pytest.param(BERT, "bert", id="bert-all-but-the-head"),
    pytest.param(VIT, "vit.layers.0", id="vit-first-block"),
    pytest.param(SWIN, "swin.embeddings", id="swin-embeddings"),
    pytest.param(MHA, "conv_proj", id="mha-patches"),
    pytest.param(MHA, "layers.0.self_attention", id="mha-attention"),
]


@pytest.mark.parametrize(("specimen", "frozen"), FROZEN)
def test_gramian_with_a_frozen_part(specimen: Specimen, frozen: str) -> None:
    """Fine-tuning: frozen parameters have no share in the Gramian, and the others still have."""
    model = specimen.make_model(specimen.attentions[-1])
    model.get_submodule(frozen).requires_grad_(False)
    engine = Engine(model)
    losses = specimen.compute_losses(model, specimen.make_batch(specimen.sizes[1]))
    assert_exact(engine, losses, model)


@pytest.mark.parametrize(("specimen", "frozen"), FROZEN)
def test_gramian_after_freezing_and_unfreezing(specimen: Specimen, frozen: str) -> None:
    """Gradual unfreezing: the engine follows `requires_grad` from call to call."""
    model = specimen.make_model(specimen.attentions[-1])
    engine = Engine(model)
    for requires_grad in (True, False, True):
        model.get_submodule(frozen).requires_grad_(requires_grad)
        losses = specimen.compute_losses(model, specimen.make_batch(specimen.sizes[1]))
        assert_exact(engine, losses, model)


def test_generation_between_a_forward_pass_and_its_gramian() -> None:
    """Sampling text runs the same modules many times without gradients."""
    model = GPT2.make_model("sdpa")
    engine = Engine(model)
    batch = GPT2.make_batch(3)
    losses = GPT2.compute_losses(model, batch)
    model.generate(batch["input_ids"][:, :2], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert_exact(engine, losses, model)


def test_gramian_from_embedded_inputs() -> None:
    """Prompt tuning: a batch enters as embeddings, and the tied embedding is used once only."""
    model = GPT2.make_model("sdpa")
    engine = Engine(model)
    embedded = torch.randn(3, 5, 8, dtype=torch.float64)
    labels = torch.randint(31, (3,))
    logits = model(inputs_embeds=embedded).logits[:, -1]
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    assert_exact(engine, losses, model)


def test_engines_on_two_parts_of_a_model() -> None:
    """The Gramians of two disjoint parts add up to the one of the whole model."""
    model = BERT.make_model("sdpa")
    body, head = Engine(model.bert), Engine(model.classifier)
    losses = BERT.compute_losses(model, BERT.make_batch(4))
    gramian = body.compute_gramian(losses) + head.compute_gramian(losses)
    jacobian = reference_jacobian(losses, trainable(model))
    assert_close_to_reference(gramian, jacobian @ jacobian.T)


def test_one_engine_on_the_parts_of_a_model() -> None:
    """Several modules given to one engine, the parent of which is never called by it."""
    model = VIT.make_model("sdpa")
    engine = Engine(model.vit, model.classifier)
    losses = VIT.compute_losses(model, VIT.make_batch(3))
    assert_exact(engine, losses, model)


def test_gramian_of_losses_that_a_model_computes_itself() -> None:
    """A scalar loss over the whole batch is one objective, `(1, 1)`."""
    model = GPT2.make_model("sdpa")
    engine = Engine(model, batch_dim=None)
    tokens = GPT2.make_batch(4)["input_ids"]
    loss = model(tokens, labels=tokens).loss
    assert_exact(engine, loss, model)
    assert_nothing_is_left(model.parameters())
