"""Speech models of the zoo, with a weight-normed convolution."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .specimen import DROPOUT, Batch, Specimen, from_config

SAMPLES = 40  # of the waveform
FRAMES = 9  # what the two convolutions leave of them
LETTERS = 7
SPOKEN = 3  # letters of each transcript


def _make_speech(batch_size: int) -> Batch:
    return {
        "waveforms": torch.randn(batch_size, SAMPLES, dtype=torch.float64),
        "transcripts": torch.randint(1, LETTERS, (batch_size, SPOKEN)),
    }


def _transcription_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["waveforms"]).logits  # (B, FRAMES, LETTERS)
    b = len(logits)
    return F.ctc_loss(
        logits.log_softmax(2).transpose(0, 1),
        batch["transcripts"],
        torch.full((b,), logits.shape[1]),
        torch.full((b,), SPOKEN),
        reduction="none",
    )


def _make_masked_speech(batch_size: int) -> Batch:
    hidden = torch.rand(batch_size, FRAMES) < 0.5
    hidden[:, 0] = True
    return _make_speech(batch_size) | {"hidden": hidden}


def _contrastive_losses(model: nn.Module, batch: Batch) -> Tensor:
    hidden = batch["hidden"]
    output = model(batch["waveforms"], mask_time_indices=hidden)
    states, codes = output.projected_states, output.projected_quantized_states
    return (1 - F.cosine_similarity(states, codes, dim=2)).masked_fill(~hidden, 0).sum(1)


WAV2VEC2_LIKE: dict[str, Any] = {
    "vocab_size": LETTERS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "conv_dim": (4, 4),
    "conv_stride": (2, 2),
    "conv_kernel": (4, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": DROPOUT,
    "activation_dropout": DROPOUT,
    "attention_dropout": DROPOUT,
    "feat_proj_dropout": DROPOUT,
    "final_dropout": DROPOUT,
    "layerdrop": 0,
}

WAV2VEC2 = Specimen(
    from_config("Wav2Vec2ForCTC", **WAV2VEC2_LIKE, mask_time_prob=0),
    _make_speech,
    _transcription_losses,
    sizes=(1, 3, FRAMES),
    invisible=("k_proj.bias",),
)

SPEECH: dict[str, Specimen] = {
    "wav2vec2": WAV2VEC2,
    "wav2vec2-masked": replace(
        WAV2VEC2,
        build=from_config(
            "Wav2Vec2ForPreTraining",
            **WAV2VEC2_LIKE,
            num_codevectors_per_group=3,
            codevector_dim=4,
            proj_codevector_dim=4,
        ),
        make_batch=_make_masked_speech,
        compute_losses=_contrastive_losses,
    ),
}
