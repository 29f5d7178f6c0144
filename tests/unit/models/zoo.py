"""Small models with random weights, each with a batch and the losses it is usually trained on.

Nothing is downloaded: every model is built from a configuration. All of them are in float64 and in
training mode, with dropout. The weights are moved away from their initial values, because ones and
zeros (norms, biases, relative-position tables) would hide mistakes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from .vision_transformer import VisionTransformer

Batch = dict[str, Tensor]
Attention = Literal["eager", "sdpa"]

TOKENS = 6
VOCABULARY = 31
CLASSES = 5
DROPOUT = 0.1
IGNORED = -100  # label of a position without a loss, the default of `F.cross_entropy`


@dataclass(frozen=True)
class Specimen:
    """A model with its data and its losses.

    Attributes:
        build: Makes the model for an implementation of attention.
        make_batch: Makes a random batch of the given number of samples.
        compute_losses: Runs the model on a batch; one loss per sample ``(B,)``, or ``(B, K)``.
        sizes: Batch sizes to test. One of them equals the number of tokens (or windows), where a
            wrong guess of the batch dimension has the right shape.
        attentions: Implementations of attention to test.
        invisible: Ends of names of parameters without influence on the losses: a key bias shifts
            all scores of a query by the same amount.
    """

    build: Callable[[Attention], nn.Module]
    make_batch: Callable[[int], Batch]
    compute_losses: Callable[[nn.Module, Batch], Tensor]
    sizes: tuple[int, ...]
    attentions: tuple[Attention, ...] = ("eager", "sdpa")
    invisible: tuple[str, ...] = ()

    def make_model(self, attention: Attention) -> nn.Module:
        """Make the model in float64 and training mode, with random norms, biases and tables."""
        model = self.build(attention).double().train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        return model


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


# --- Decoders -------------------------------------------------------------------------------------


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


# --- Encoders -------------------------------------------------------------------------------------


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


# --- Encoder and decoder --------------------------------------------------------------------------


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


# --- Images ---------------------------------------------------------------------------------------


def _build_vit(attention: Attention) -> nn.Module:
    return transformers.ViTForImageClassification(_vit_config(attention))


def _build_vit_masked(attention: Attention) -> nn.Module:
    return transformers.ViTForMaskedImageModeling(_vit_config(attention))


def _vit_config(attention: Attention) -> transformers.ViTConfig:
    return transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        encoder_stride=4,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        num_labels=CLASSES,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        attn_implementation=attention,
    )


def _build_swin(attention: Attention, image_size: int = 8) -> nn.Module:
    config = transformers.SwinConfig(
        image_size=image_size,
        patch_size=2,
        embed_dim=4,
        depths=(2, 2),
        num_heads=(1, 2),
        window_size=2,
        mlp_ratio=2.0,
        num_labels=CLASSES,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        drop_path_rate=DROPOUT,
        use_absolute_embeddings=True,
        attn_implementation=attention,
    )
    return transformers.SwinForImageClassification(config)


def _build_padded_swin(attention: Attention) -> nn.Module:
    return _build_swin(attention, image_size=10)  # 5 x 5 patches: padded to whole windows


def _build_vision_transformer(_: Attention, *, batch_first: bool = True) -> nn.Module:
    return VisionTransformer(
        image_size=8,
        patch_size=4,
        width=8,
        depth=2,
        heads=2,
        classes=CLASSES,
        dropout=DROPOUT,
        batch_first=batch_first,
    )


def _build_tokens_first_vision_transformer(attention: Attention) -> nn.Module:
    return _build_vision_transformer(attention, batch_first=False)


def _make_images(batch_size: int, image_size: int = 8) -> Batch:
    images = torch.randn(batch_size, 3, image_size, image_size, dtype=torch.float64)
    return {"images": images, "labels": torch.randint(CLASSES, (batch_size,))}


def _make_odd_images(batch_size: int) -> Batch:
    return _make_images(batch_size, image_size=10)


def _make_masked_images(batch_size: int) -> Batch:
    return _make_images(batch_size) | {"hidden": torch.arange(4).expand(batch_size, -1) % 2 == 0}


def _image_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["images"])
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def _reconstruction_losses(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["images"]
    output = model(images, bool_masked_pos=batch["hidden"])
    return (output.reconstruction - images).square().flatten(1).mean(1)


GPT2 = Specimen(_build_gpt2, _make_language_batch, _next_token_losses, sizes=(1, 4, TOKENS))
LLAMA = replace(GPT2, build=_build_llama)
BERT = Specimen(
    _build_bert_classifier,
    _make_sentences,
    _sentence_losses,
    sizes=(1, 4, TOKENS),
    invisible=("key.bias",),
)
VIT = Specimen(_build_vit, _make_images, _image_losses, sizes=(1, 3, 5), invisible=("k_proj.bias",))
SWIN = replace(VIT, build=_build_swin, sizes=(1, 3, 4))  # windows of 4 patches; 16, then 4, patches
MHA = replace(VIT, build=_build_vision_transformer, attentions=("sdpa",), invisible=())

SPECIMENS: dict[str, Specimen] = {
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
    "t5": Specimen(_build_t5, _make_translations, _translation_losses, sizes=(1, 4, TOKENS)),
    "vit": VIT,
    "vit-masked": replace(
        VIT,
        build=_build_vit_masked,
        make_batch=_make_masked_images,
        compute_losses=_reconstruction_losses,
    ),
    "swin": SWIN,
    "swin-padded": replace(SWIN, build=_build_padded_swin, make_batch=_make_odd_images),
    "mha": MHA,
    "mha-tokens-first": replace(MHA, build=_build_tokens_first_vision_transformer),
}
