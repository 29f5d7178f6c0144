"""Adapters of the zoo: frozen models with a few trainable parameters beside them."""

import warnings
from dataclasses import replace
from typing import Any

import peft
from torch import Tensor, nn

from .decoders import GPT2, LLAMA, LLAMA_LIKE
from .encoders import BERT, BERT_LIKE
from .specimen import Attention, Batch, Build, Specimen, from_config
from .text import TOKENS, make_padded_text, sequence_losses

PROMPT = 2  # virtual tokens

GPT2_TARGETS: dict[str, Any] = {
    "task_type": "CAUSAL_LM",
    "target_modules": ["c_attn", "c_proj"],  # three in each of the two layers
    "fan_in_fan_out": True,
}
BERT_TARGETS: dict[str, Any] = {
    "task_type": "SEQ_CLS",  # the classifier is trained, too
    "target_modules": ["query", "value"],
}
LLAMA_TARGETS: dict[str, Any] = {
    "task_type": "CAUSAL_LM",
    "target_modules": ["embed_tokens", "q_proj"],  # peft reads rows of a transposed factor
}
LOW_RANK: dict[str, Any] = {"r": 2, "lora_dropout": 0.1}


def adapted(build: Build, config: peft.PeftConfig) -> Build:
    """A factory of a model with adapters."""

    def build_adapted(attention: Attention) -> nn.Module:
        with warnings.catch_warnings():
            # peft 0.21 reads an attribute that transformers 5 has renamed.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            return peft.get_peft_model(build(attention), config)

    return build_adapted


def _next_token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Losses of a decoder that has read a prompt first."""
    logits = model(**batch).logits[:, -TOKENS:-1]
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return sequence_losses(logits, labels[:, 1:])


def _adapted_gpt2(config: peft.PeftConfig) -> Specimen:
    return replace(
        GPT2,
        build=adapted(GPT2.build, config),
        make_batch=make_padded_text,
        compute_losses=_next_token_losses,
        attentions=("sdpa",),
    )


def _adapted_bert(config: peft.PeftConfig) -> Specimen:
    longer = BERT_LIKE | {"max_position_embeddings": TOKENS + PROMPT}
    build = from_config("BertForSequenceClassification", **longer)
    return replace(BERT, build=adapted(build, config), attentions=("sdpa",), invisible=())


ADAPTERS: dict[str, Specimen] = {
    "gpt2-lora": _adapted_gpt2(peft.LoraConfig(**GPT2_TARGETS, **LOW_RANK)),
    "gpt2-dora": _adapted_gpt2(peft.LoraConfig(**GPT2_TARGETS, **LOW_RANK, use_dora=True)),
    "gpt2-prompt": _adapted_gpt2(
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=PROMPT)
    ),
    "llama-lora": replace(
        LLAMA,
        build=adapted(
            from_config("LlamaForCausalLM", **LLAMA_LIKE),
            peft.LoraConfig(**LLAMA_TARGETS, **LOW_RANK),
        ),
        make_batch=make_padded_text,
        attentions=("sdpa",),
    ),
    "bert-lora": _adapted_bert(peft.LoraConfig(**BERT_TARGETS, **LOW_RANK)),
    "bert-dora": _adapted_bert(peft.LoraConfig(**BERT_TARGETS, **LOW_RANK, use_dora=True)),
    "bert-prompt": _adapted_bert(
        peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=PROMPT)
    ),
}
