"""Video models of the zoo: frames and patches in the batch by turns, and tubes of patches."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .specimen import CLASSES, DROPOUT, Batch, Specimen, from_config

FRAMES = 3
VIDEO_LIKE: dict[str, Any] = {
    "image_size": 8,
    "num_frames": FRAMES,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "num_labels": CLASSES,
    "hidden_dropout_prob": DROPOUT,
    "attention_probs_dropout_prob": DROPOUT,
}


def _make_videos(batch_size: int, frames: int = FRAMES) -> Batch:
    videos = torch.randn(batch_size, frames, 3, 8, 8, dtype=torch.float64)
    return {"videos": videos, "labels": torch.randint(CLASSES, (batch_size,))}


def _make_longer_videos(batch_size: int) -> Batch:
    """One frame more than there are embeddings for, which are interpolated."""
    return _make_videos(batch_size, FRAMES + 1)


def _class_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["videos"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


# The first rows of all frames stand for the class tokens of the samples, whichever video they are
# of, so that a row of the position embedding's sum belongs to one sample but for its first token.
TIMESFORMER = Specimen(
    from_config("TimesformerForVideoClassification", **VIDEO_LIKE, patch_size=4),
    _make_videos,
    _class_losses,
    sizes=(1, 4, FRAMES),
    attentions=("eager",),
)
VIDEOMAE = replace(
    TIMESFORMER,
    build=from_config("VideoMAEForVideoClassification", **VIDEO_LIKE, patch_size=4, tubelet_size=1),
    attentions=("eager", "sdpa"),
)

VIDEOS: dict[str, Specimen] = {
    "timesformer": TIMESFORMER,
    "timesformer-joint": replace(
        TIMESFORMER,
        build=from_config(
            "TimesformerForVideoClassification",
            **VIDEO_LIKE,
            patch_size=4,
            attention_type="joint_space_time",
        ),
        make_batch=_make_longer_videos,
    ),
    "videomae": VIDEOMAE,
    "vivit": replace(
        VIDEOMAE,
        build=from_config("VivitForVideoClassification", **VIDEO_LIKE, tubelet_size=[1, 4, 4]),
        invisible=("k_proj.bias",),
    ),
}
