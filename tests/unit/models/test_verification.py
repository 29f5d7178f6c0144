"""Verification of models that compute in float32 in places, whatever their parameters are in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, VerificationError
from autogram._capture.backward.assembly import Assembly

from .decoders import LLAMA, LLAMA_LIKE, MIXTRAL, MIXTRAL_LIKE, Specimen
from .specimen import Batch, Build, from_config
from .text import TOKENS, VOCABULARY, make_text, make_tokens
from .zoo import SPECIMENS


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


def model_and_losses(name: str) -> tuple[nn.Module, Engine, Tensor]:
    """A model in float64, with two losses for each sample."""
    build, make_batch = BUILDS[name]
    specimen = Specimen(build, make_batch, two_losses, (4,))
    model = specimen.make_model("eager")
    engine = Engine(model, batch_dim=0, verify="never")
    return model, engine, two_losses(model, make_batch(4))


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("name", BUILDS)
def test_right_answers_pass(name: str, each: int) -> None:
    """For many vectors: cotangents are rounded one by one here, and together there."""
    model, engine, losses = model_and_losses(name)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    losses = losses if each == 2 else losses.sum(1)
    for _ in range(10):
        engine.verify(losses)
    assert engine.compute_gramian(losses).dtype == torch.float64


@pytest.mark.parametrize("name", BUILDS)
def test_wrong_answers_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cotangents of the output layer that are off by one percent."""
    model, engine, losses = model_and_losses(name)
    engine.verify(losses)
    add, last = Assembly._add, model.get_output_embeddings().weight

    def add_more(self, use, layout, saved, cotangent):
        is_last = use.function == "linear" and any(last is p for p in use.reads[0].sources)
        add(self, use, layout, saved, cotangent * 1.01 if is_last else cotangent)

    monkeypatch.setattr(Assembly, "_add", add_more)
    with pytest.raises(VerificationError):
        engine.verify(losses)
