"""Decoders of the zoo: they predict the next token."""

from dataclasses import replace
from typing import Any

import torch

from .specimen import DROPOUT, Specimen, from_config, in_float64
from .text import (
    TOKENS,
    VOCABULARY,
    make_left_padded_text,
    make_padded_text,
    make_text,
    next_token_losses,
)

# What the configurations of Llama and its relatives share.
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": TOKENS,
    "attention_dropout": DROPOUT,
}
MIXTRAL_LIKE = LLAMA_LIKE | {"num_local_experts": 3, "num_experts_per_tok": 2}

GPT2 = Specimen(
    from_config(
        "GPT2LMHeadModel",
        vocab_size=VOCABULARY,
        n_positions=TOKENS + 2,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT,
        attn_pdrop=DROPOUT,
        bos_token_id=0,
        eos_token_id=0,
    ),
    make_text,
    next_token_losses,
    sizes=(1, 4, TOKENS),
)
LLAMA = replace(GPT2, build=from_config("LlamaForCausalLM", **LLAMA_LIKE, tie_word_embeddings=True))
GEMMA = replace(
    GPT2,
    build=from_config("GemmaForCausalLM", **LLAMA_LIKE, head_dim=4),
    compute_losses=in_float64(next_token_losses),
)
MAMBA = replace(
    GEMMA,
    build=from_config(
        "MambaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=8,
        state_size=3,
        num_hidden_layers=2,
        time_step_rank=2,
        use_cache=False,
    ),
    attentions=("eager",),
    is_random=False,
)

MIXTRAL = replace(  # calls an expert with the tokens that are sent to it, of whatever sample
    GPT2,
    build=from_config("MixtralForCausalLM", **MIXTRAL_LIKE, experts_implementation="eager"),
)

DECODERS: dict[str, Specimen] = {
    "gpt2": GPT2,
    "gpt2-left-padded": replace(GPT2, make_batch=make_left_padded_text),
    "gpt-neox": replace(
        GPT2,
        build=from_config(
            "GPTNeoXForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=TOKENS,
            attention_dropout=DROPOUT,
            hidden_dropout=DROPOUT,
        ),
    ),
    "llama": LLAMA,
    "llama-padded": replace(LLAMA, make_batch=make_padded_text),
    "mistral": replace(
        GPT2, build=from_config("MistralForCausalLM", **LLAMA_LIKE, sliding_window=4)
    ),
    "qwen2": replace(GPT2, build=from_config("Qwen2ForCausalLM", **LLAMA_LIKE)),
    "gemma": GEMMA,
    "mamba": MAMBA,
    "mixtral": MIXTRAL,
    "mixtral-stacked": replace(
        MIXTRAL,
        build=from_config(
            "MixtralForCausalLM", **MIXTRAL_LIKE, experts_implementation="batched_mm"
        ),
        attentions=("sdpa",),
    ),
    "mixtral-sorted": replace(
        MIXTRAL,
        build=from_config(
            "MixtralForCausalLM", **MIXTRAL_LIKE, experts_implementation="grouped_mm"
        ),
        attentions=("sdpa",),
        dtype=torch.float32,  # the only one that `grouped_mm` has on a CPU, beside half precision
    ),
}
