"""Language models of the zoo: decoders, encoders, and one that is both."""

from dataclasses import replace

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from .specimen import CLASSES, DROPOUT, Attention, Batch, Specimen

TOKENS = 6
VOCABULARY = 31
IGNORED = -100  # label of a position without a loss, the default of `F.cross_entropy`


def sequence_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of ``(B, T, V)`` with ``(B, T)``, averaged over each sequence: ``(B,)``."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # (B, T)
    return losses.sum(1) / (labels != IGNORED).sum(1)


def make_tokens(batch_size: int) -> Tensor:
    """Random token indices, shape ``(B, TOKENS)``; 0 is left out, as it pads in some models."""
    return torch.randint(1, VOCABULARY, (batch_size, TOKENS))


def make_padding_mask(batch_size: int) -> Tensor:
    """Mask ``(B, TOKENS)`` of right-padded sequences of different lengths; 1 is a token."""
    lengths = TOKENS - torch.arange(batch_size) % 3
    return (torch.arange(TOKENS) < lengths[:, None]).long()


def _build_gpt2(attention: Attention) -> nn.Module:
    config = transformers.GPT2Config(
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
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config)


def _build_llama(attention: Attention) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=TOKENS,
        attention_dropout=DROPOUT,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def _make_language_batch(batch_size: int) -> Batch:
    return {"input_ids": make_tokens(batch_size)}


def _make_padded_language_batch(batch_size: int) -> Batch:
    return _make_language_batch(batch_size) | {"attention_mask": make_padding_mask(batch_size)}


def _make_left_padded_language_batch(batch_size: int) -> Batch:
    mask = make_padding_mask(batch_size).flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # a position lookup that differs per sample
    return _make_language_batch(batch_size) | {"attention_mask": mask, "position_ids": positions}


def _next_token_losses(model: nn.Module, batch: Batch) -> Tensor:
    labels = batch["input_ids"]
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED)
    return sequence_losses(model(**batch).logits[:, :-1], labels[:, 1:])


def _bert_config(attention: Attention) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=TOKENS,
        num_labels=CLASSES,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        attn_implementation=attention,
    )


def _build_bert_classifier(attention: Attention) -> nn.Module:
    return transformers.BertForSequenceClassification(_bert_config(attention))


def _build_bert_two_tasks(attention: Attention) -> nn.Module:
    return transformers.BertForPreTraining(_bert_config(attention))


def _make_sentences(batch_size: int) -> Batch:
    segments = (torch.arange(TOKENS) >= TOKENS // 2).long().expand(batch_size, -1)
    return _make_padded_language_batch(batch_size) | {
        "token_type_ids": segments,
        "labels": torch.randint(CLASSES, (batch_size,)),
    }


def _make_pretraining_sentences(batch_size: int) -> Batch:
    batch = _make_sentences(batch_size)
    words = batch["input_ids"].masked_fill(torch.arange(TOKENS) % 2 == 1, IGNORED)
    return batch | {"words": words, "labels": torch.randint(2, (batch_size,))}


def _sentence_losses(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def _two_task_losses(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    output = model(**inputs)
    words = sequence_losses(output.prediction_logits, batch["words"])
    follows = F.cross_entropy(output.seq_relationship_logits, batch["labels"], reduction="none")
    return torch.stack([words, follows], dim=1)  # (B, 2)


def _build_t5(attention: Attention) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=4,
        relative_attention_max_distance=4,
        dropout_rate=DROPOUT,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    return transformers.T5ForConditionalGeneration(config)


def _make_translations(batch_size: int) -> Batch:
    targets = make_tokens(batch_size)
    starts = torch.zeros(batch_size, 1, dtype=torch.long)
    return _make_padded_language_batch(batch_size) | {
        "decoder_input_ids": torch.cat([starts, targets[:, :-1]], dim=1),
        "labels": targets.masked_fill(make_padding_mask(batch_size) == 0, IGNORED),
    }


def _translation_losses(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return sequence_losses(model(**inputs).logits, batch["labels"])


GPT2 = Specimen(_build_gpt2, _make_language_batch, _next_token_losses, sizes=(1, 4, TOKENS))
LLAMA = replace(GPT2, build=_build_llama)
BERT = Specimen(
    _build_bert_classifier,
    _make_sentences,
    _sentence_losses,
    sizes=(1, 4, TOKENS),
    invisible=("key.bias",),
)
T5 = Specimen(_build_t5, _make_translations, _translation_losses, sizes=(1, 4, TOKENS))

LANGUAGE: dict[str, Specimen] = {
    "gpt2": GPT2,
    "gpt2-left-padded": replace(GPT2, make_batch=_make_left_padded_language_batch),
    "llama": LLAMA,
    "llama-padded": replace(LLAMA, make_batch=_make_padded_language_batch),
    "bert": BERT,
    "bert-two-tasks": replace(
        BERT,
        build=_build_bert_two_tasks,
        make_batch=_make_pretraining_sentences,
        compute_losses=_two_task_losses,
    ),
    "t5": T5,
}
