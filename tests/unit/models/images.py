"""Image models of the zoo: with patches, windows, convolutions, and `nn.MultiheadAttention`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .specimen import CLASSES, DROPOUT, Attention, Batch, Build, Specimen, from_config
from .vision_transformer import VisionTransformer

# What the configurations of ViT and its relatives share.
VIT_LIKE: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "num_labels": CLASSES,
    "hidden_dropout_prob": DROPOUT,
    "attention_probs_dropout_prob": DROPOUT,
}
SWIN_LIKE: dict[str, Any] = {
    "patch_size": 2,
    "embed_dim": 4,
    "depths": (2, 2),
    "num_heads": (1, 2),
    "window_size": 2,
    "mlp_ratio": 2.0,
    "num_labels": CLASSES,
    "hidden_dropout_prob": DROPOUT,
    "attention_probs_dropout_prob": DROPOUT,
    "drop_path_rate": DROPOUT,
    "use_absolute_embeddings": True,
}
SEGFORMER_LIKE: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": (1, 1),
    "sr_ratios": (2, 1),
    "hidden_sizes": (4, 8),
    "patch_sizes": (3, 3),
    "strides": (2, 2),
    "num_attention_heads": (1, 2),
    "mlp_ratios": (2, 2),
    "decoder_hidden_size": 6,
    "num_labels": CLASSES,
    "hidden_dropout_prob": DROPOUT,
    "attention_probs_dropout_prob": DROPOUT,
    "drop_path_rate": DROPOUT,
}


def _vision_transformer(*, batch_first: bool = True) -> Build:
    def build(_: Attention) -> nn.Module:
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

    return build


def _make_images(batch_size: int, image_size: int = 8) -> Batch:
    images = torch.randn(batch_size, 3, image_size, image_size, dtype=torch.float64)
    return {"images": images, "labels": torch.randint(CLASSES, (batch_size,))}


def _make_odd_images(batch_size: int) -> Batch:
    return _make_images(batch_size, image_size=10)


def _make_masked_images(batch_size: int) -> Batch:
    return _make_images(batch_size) | {"hidden": torch.arange(4).expand(batch_size, -1) % 2 == 0}


def _make_segmented_images(batch_size: int) -> Batch:
    return _make_images(batch_size) | {"labels": torch.randint(CLASSES, (batch_size, 4, 4))}


def _make_captioned_images(batch_size: int) -> Batch:
    return _make_images(batch_size) | {"captions": torch.randn(batch_size, 6, dtype=torch.float64)}


def _image_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["images"])
    logits = logits if isinstance(logits, Tensor) else logits.logits
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")  # of images, or pixels
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def _reconstruction_losses(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["images"]
    output = model(images, bool_masked_pos=batch["hidden"])
    return (output.reconstruction - images).square().flatten(1).mean(1)


def _autoencoder_losses(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch["images"])
    errors = (output.logits - model.patchify(batch["images"])).square().mean(2)  # (B, patches)
    return (errors * output.mask).sum(1) / output.mask.sum(1)  # of the patches that were hidden


def _caption_losses(model: nn.Module, batch: Batch) -> Tensor:
    return 1 - F.cosine_similarity(model(batch["images"]).image_embeds, batch["captions"])


VIT = Specimen(
    from_config("ViTForImageClassification", **VIT_LIKE, encoder_stride=4),
    _make_images,
    _image_losses,
    sizes=(1, 3, 5),
    invisible=("k_proj.bias",),
)
SWIN = replace(
    VIT,
    build=from_config("SwinForImageClassification", **SWIN_LIKE, image_size=8),
    sizes=(1, 3, 4),  # windows of 4 patches; 16, then 4, patches
)
MHA = replace(VIT, build=_vision_transformer(), attentions=("sdpa",), invisible=())
CONVNEXT = replace(
    VIT,
    build=from_config(
        "ConvNextForImageClassification",
        patch_size=2,
        num_stages=2,
        depths=(1, 1),
        hidden_sizes=(4, 8),
        num_labels=CLASSES,
        layer_scale_init_value=0.5,
        drop_path_rate=0.5,  # of the last block, the only one that is dropped at all
    ),
    attentions=("eager",),
    invisible=(),
)
RESNET = replace(
    CONVNEXT,
    build=from_config(
        "ResNetForImageClassification",
        embedding_size=4,
        hidden_sizes=(4, 8),
        depths=(1, 1),
        layer_type="basic",
        num_labels=CLASSES,
    ),
    is_random=False,
)

IMAGES: dict[str, Specimen] = {
    "vit": VIT,
    "vit-masked": replace(
        VIT,
        build=from_config("ViTForMaskedImageModeling", **VIT_LIKE, encoder_stride=4),
        make_batch=_make_masked_images,
        compute_losses=_reconstruction_losses,
    ),
    "deit": replace(
        VIT,
        build=from_config("DeiTForImageClassificationWithTeacher", **VIT_LIKE),
        sizes=(1, 3, 6),
    ),
    "beit": replace(
        VIT,
        build=from_config(
            "BeitForImageClassification",
            **VIT_LIKE,
            use_relative_position_bias=True,
            use_absolute_position_embeddings=True,
            drop_path_rate=DROPOUT,
        ),
        invisible=(),
    ),
    "vit-mae": replace(
        VIT,
        build=from_config(
            "ViTMAEForPreTraining",
            **VIT_LIKE,
            mask_ratio=0.5,
            decoder_hidden_size=4,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=6,
        ),
        compute_losses=_autoencoder_losses,
    ),
    "clip-vision": replace(
        VIT,
        build=from_config(
            "CLIPVisionModelWithProjection",
            image_size=8,
            patch_size=4,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            projection_dim=6,
            attention_dropout=DROPOUT,
        ),
        make_batch=_make_captioned_images,
        compute_losses=_caption_losses,
    ),
    "swin": SWIN,
    "swin-padded": replace(
        SWIN,  # 5 x 5 patches: padded to whole windows
        build=from_config("SwinForImageClassification", **SWIN_LIKE, image_size=10),
        make_batch=_make_odd_images,
    ),
    "convnext": CONVNEXT,
    "resnet": RESNET,
    "segformer": replace(
        VIT,
        build=from_config("SegformerForSemanticSegmentation", **SEGFORMER_LIKE),
        make_batch=_make_segmented_images,
        sizes=(1, 3, 4),
    ),
    "mha": MHA,
    "mha-tokens-first": replace(MHA, build=_vision_transformer(batch_first=False)),
}
