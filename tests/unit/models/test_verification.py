"""Verification of models that compute in float32 in places, whatever their parameters are in."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, VerificationError
from autogram.rules import Recipe, find_rule, product, register_rule, unregister_rule
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable

from .decoders import LLAMA, LLAMA_LIKE, MIXTRAL, MIXTRAL_LIKE, Specimen
from .specimen import Batch, Build, from_config
from .text import TOKENS, VOCABULARY, make_text, make_tokens
from .zoo import SPECIMENS

pytestmark = pytest.mark.slow


def two_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the first tokens of a sequence, and of the others: ``(B, 2)``."""
    labels = batch.get("decoder_input_ids", batch["input_ids"])[:, 1:]
    logits = model(**batch).logits[:, :-1].transpose(1, 2)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack([losses[:, :2].sum(1), losses[:, 2:].sum(1)], 1)


def make_pair(batch_size: int) -> Batch:
    return make_text(batch_size) | {"decoder_input_ids": make_tokens(batch_size)}


BUILDS: dict[str, tuple[Build, Callable[[int], Batch]]] = {
    "llama": (LLAMA.build, make_text),
    "mistral": (SPECIMENS["mistral"].build, make_text),
    "qwen2": (SPECIMENS["qwen2"].build, make_text),
    "mixtral": (MIXTRAL.build, make_text),
    "gemma": (SPECIMENS["gemma"].build, make_text),
    "mamba": (SPECIMENS["mamba"].build, make_text),
    "t5": (SPECIMENS["t5"].build, make_pair),
    "bloom": (
        from_config("BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=8, n_layer=2, n_head=2),
        make_text,
    ),
    "rwkv": (
        from_config(
            "RwkvForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=2,
            attention_hidden_size=8,
            intermediate_size=12,
            context_length=TOKENS,
            use_cache=False,
        ),
        make_text,
    ),
    "gpt-oss": (
        from_config(
            "GptOssForCausalLM",
            **MIXTRAL_LIKE,
            head_dim=4,
            sliding_window=4,
            pad_token_id=0,
            experts_implementation="eager",
        ),
        make_text,
    ),
    "jamba": (
        from_config(
            "JambaForCausalLM",
            **LLAMA_LIKE,
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=3,
            mamba_dt_rank=2,
            use_mamba_kernels=False,
            use_cache=False,
            pad_token_id=0,
            experts_implementation="eager",
        ),
        make_text,
    ),
}


def prepared(name: str) -> tuple[nn.Module, Engine, Batch]:
    """A model in float64, with a batch of four samples."""
    build, make_batch = BUILDS[name]
    specimen = Specimen(build, make_batch, two_losses, (4,))
    model = specimen.make_model("eager")
    engine = Engine(model, batch_dim=0, verify="never")
    return model, engine, make_batch(4)


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("name", BUILDS)
def test_right_answers_pass(name: str, each: int) -> None:
    """For many vectors: cotangents are rounded one by one here, and together there."""
    model, engine, batch = prepared(name)
    losses = two_losses(model, batch)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    losses = losses if each == 2 else losses.sum(1)
    for _ in range(10):
        engine.verify(losses)
    assert engine.compute_gramian(losses).dtype == torch.float64


@pytest.mark.parametrize("seed", range(12, 21))
def test_cotangents_that_are_rounding_alone(seed: int) -> None:
    """The largest of some numbers cancels in an RWKV, and of its cotangent some digits are left.

    Sums of objectives have others than each of them.
    """
    torch.manual_seed(seed)
    model, engine, batch = prepared("rwkv")
    losses = two_losses(model, batch)
    engine.verify(losses)
    jacobian = reference_jacobian(losses, trainable(model))
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


@contextmanager
def wrong_rule(wrong: nn.Parameter) -> Iterator[None]:
    """A rule of `F.linear` whose block of one weight is off by one percent."""
    right = find_rule(F.linear)
    assert right is not None

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[Recipe]:
        if weight is not wrong:
            return right(input, weight, bias)
        assert bias is None
        t = "TSR"[: input.dim() - 1]
        return [product(weight, f"{t}o,{t}i->oi", input, scale=1.01)]

    unregister_rule(F.linear)
    register_rule(F.linear)(linear)
    try:
        yield
    finally:
        unregister_rule(F.linear)
        register_rule(F.linear, holds_for_complex=True)(right)


@pytest.mark.parametrize("name", BUILDS)
def test_wrong_answers_are_found(name: str) -> None:
    """The output layer has a rule that is slightly wrong."""
    model, engine, batch = prepared(name)
    with wrong_rule(model.get_output_embeddings().weight):
        losses = two_losses(model, batch)
    with pytest.raises(VerificationError):
        engine.verify(losses)
