"""Image models of the zoo: with patches, with windows, and with `nn.MultiheadAttention`."""

from dataclasses import replace

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from .specimen import CLASSES, DROPOUT, Attention, Batch, Specimen
from .vision_transformer import VisionTransformer


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


VIT = Specimen(_build_vit, _make_images, _image_losses, sizes=(1, 3, 5), invisible=("k_proj.bias",))
SWIN = replace(VIT, build=_build_swin, sizes=(1, 3, 4))  # windows of 4 patches; 16, then 4, patches
MHA = replace(VIT, build=_build_vision_transformer, attentions=("sdpa",), invisible=())

IMAGES: dict[str, Specimen] = {
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
