"""Batches of tokens, and the losses that language models are trained on."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .specimen import CLASSES, Batch

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


def make_text(batch_size: int) -> Batch:
    """Sequences of equal lengths."""
    return {"input_ids": make_tokens(batch_size)}


def make_padded_text(batch_size: int) -> Batch:
    """Sequences that are padded on the right."""
    return make_text(batch_size) | {"attention_mask": make_padding_mask(batch_size)}


def make_left_padded_text(batch_size: int) -> Batch:
    """Sequences that are padded on the left."""
    mask = make_padding_mask(batch_size).flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # a position lookup that differs per sample
    return make_text(batch_size) | {"attention_mask": mask, "position_ids": positions}


def next_token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Losses of a decoder."""
    labels = batch["input_ids"]
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED)
    return sequence_losses(model(**batch).logits[:, :-1], labels[:, 1:])


def make_labelled_text(batch_size: int) -> Batch:
    """Padded sequences, each with a class."""
    labels = torch.randint(CLASSES, (batch_size,))
    return make_padded_text(batch_size) | {"labels": labels}


def make_sentences(batch_size: int) -> Batch:
    """Padded pairs of sentences, each with a class."""
    segments = (torch.arange(TOKENS) >= TOKENS // 2).long().expand(batch_size, -1)
    return make_labelled_text(batch_size) | {"token_type_ids": segments}


def class_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Losses of a classifier."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def make_masked_text(batch_size: int) -> Batch:
    """Padded sequences with the words to predict: those at every second place."""
    batch = make_padded_text(batch_size)
    words = batch["input_ids"].masked_fill(torch.arange(TOKENS) % 2 == 1, IGNORED)
    return batch | {"words": words}


def masked_token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Losses of an encoder that predicts words."""
    inputs = {name: value for name, value in batch.items() if name != "words"}
    return sequence_losses(model(**inputs).logits, batch["words"])


def make_pretraining_sentences(batch_size: int) -> Batch:
    """Pairs of sentences, words to predict, and whether the second follows the first."""
    follows = torch.randint(2, (batch_size,))
    return make_sentences(batch_size) | make_masked_text(batch_size) | {"labels": follows}


def two_task_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Two losses for each sample."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    output = model(**inputs)
    words = sequence_losses(output.prediction_logits, batch["words"])
    follows = F.cross_entropy(output.seq_relationship_logits, batch["labels"], reduction="none")
    return torch.stack([words, follows], dim=1)  # (B, 2)


def make_translations(batch_size: int) -> Batch:
    """Padded sequences, each with a target, shifted by one for the decoder."""
    targets = make_tokens(batch_size)
    starts = torch.zeros(batch_size, 1, dtype=torch.long)
    return make_padded_text(batch_size) | {
        "decoder_input_ids": torch.cat([starts, targets[:, :-1]], dim=1),
        "labels": targets.masked_fill(make_padding_mask(batch_size) == 0, IGNORED),
    }


def translation_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Losses of an encoder with a decoder."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return sequence_losses(model(**inputs).logits, batch["labels"])
