"""What is measured on a GPU: models of the size that people train there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.speed.workloads import Batch, Workload

CLASSES = 1000


class Logits(nn.Module):
    """A model of transformers that returns its logits alone.

    Args:
        model: The model.
        argument: The name of its input.
        makes_mask: Whether the model makes a causal mask of its own, but only while a graph is
            captured, so that other calls would be captured than those of the steps before
            (docs/cuda_graphs.md).

    Attributes:
        is_captured: Whether a step of the model will be captured. Then tokens get a mask, if the
            model would make one.
    """

    def __init__(
        self, model: nn.Module, argument: str = "input_ids", *, makes_mask: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.argument, self.makes_mask = argument, makes_mask
        self.is_captured = False

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits."""
        given = {self.argument: inputs}
        if self.makes_mask and self.is_captured:
            samples, tokens = inputs.shape
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=inputs.device).tril()
            given["attention_mask"] = mask.expand(samples, 1, tokens, tokens)
        return self.model(**given).logits


class LoRA(nn.Module):
    """A linear layer that is frozen, and a trainable product of two thin ones beside it."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False, dtype=linear.weight.dtype)
        self.up = nn.Linear(rank, linear.out_features, bias=False, dtype=linear.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Both added up."""
        return self.linear(x) + self.up(self.down(x))


def make_gpt2(tokens: int, **sizes: int) -> nn.Module:
    """GPT-2, small unless sizes say otherwise, without dropout, which torchjd does not take."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(n_positions=tokens, use_cache=False, **dropout, **sizes)
    return Logits(transformers.GPT2LMHeadModel(config), makes_mask=True)


def make_vit(**sizes: int) -> nn.Module:
    """ViT-B/16, unless sizes say otherwise."""
    config = transformers.ViTConfig(num_labels=CLASSES, **sizes)
    return Logits(transformers.ViTForImageClassification(config), "pixel_values")


def make_resnet(**sizes: Any) -> nn.Module:
    """ResNet-50 with group normalisation in place of that of batches, which mixes samples."""
    model = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(num_labels=CLASSES, **sizes)
    )
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                groups = min(32, child.num_features)
                setattr(module, name, nn.GroupNorm(groups, child.num_features))
    return Logits(model, "pixel_values")


def make_llama(rank: int, **sizes: int) -> nn.Module:
    """A Llama in bfloat16, frozen, with adapters on the seven projections of each layer."""
    config = transformers.LlamaConfig(use_cache=False, **sizes)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, LoRA(child, rank))
    return Logits(model, makes_mask=True)


def make_perceptron(depth: int, width: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, width))


class Encoder(nn.Module):
    """An encoder of PyTorch's own layers, and a linear layer behind the mean of its positions."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = {"d_model": width, "nhead": width // 64 or 1, "dim_feedforward": 4 * width}
        layer = nn.TransformerEncoderLayer(**sizes, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.body(x).mean(1))


def make_small_cnn() -> nn.Module:
    """The network for CIFAR of torchjd's benchmark: three convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ELU(), nn.Conv2d(32, 64, 3, groups=32), nn.MaxPool2d(2)),
        *(nn.ELU(), nn.Conv2d(64, 64, 3, groups=64), nn.MaxPool2d(3), nn.ELU(), nn.Flatten()),
        *(nn.Linear(1024, 128), nn.ELU(), nn.Linear(128, CLASSES)),
    )


def make_tokens(length: int, vocabulary: int, batch_size: int) -> Batch:
    """Random tokens, and the tokens behind them."""
    tokens = torch.randint(vocabulary, (batch_size, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def make_images(size: int, batch_size: int) -> Batch:
    """Random images and classes."""
    return torch.randn(batch_size, 3, size, size), torch.randint(CLASSES, (batch_size,))


def make_sequences(tokens: int, width: int, batch_size: int) -> Batch:
    """Random sequences of vectors, and classes."""
    return torch.randn(batch_size, tokens, width), torch.randint(CLASSES, (batch_size,))


def make_vectors(width: int, batch_size: int) -> Batch:
    """Random vectors and classes."""
    return torch.randn(batch_size, width), torch.randint(width, (batch_size,))


def losses_of_sequences(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens of each sample, ``(B,)``."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


def losses_of_classes(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample, ``(B,)``."""
    return F.cross_entropy(logits, targets, reduction="none")


def _language(
    name: str, make_model: Callable[[], nn.Module], tokens: int, vocabulary: int, batch_size: int
) -> Workload:
    """A workload of a language model."""
    make_batch = partial(make_tokens, tokens, vocabulary)
    description = f"{name}, T = {tokens}, B = {batch_size}"
    return Workload(
        description, make_model, make_batch, losses_of_sequences, batch_size, check_size=2
    )


def _images(name: str, make_model: Callable[[], nn.Module], size: int, batch_size: int) -> Workload:
    """A workload of a classifier of images."""
    make_batch = partial(make_images, size)
    description = f"{name}, B = {batch_size}"
    return Workload(
        description, make_model, make_batch, losses_of_classes, batch_size, check_size=2
    )


def _sequences(depth: int, width: int, tokens: int, batch_size: int) -> Workload:
    """A workload of an encoder."""
    return Workload(
        f"encoder {depth} x {width}, T = {tokens}, B = {batch_size}",
        partial(Encoder, width, depth),
        partial(make_sequences, tokens, width),
        losses_of_classes,
        batch_size,
    )


def _vectors(depth: int, width: int, batch_size: int) -> Workload:
    """A workload of a perceptron."""
    return Workload(
        f"MLP {depth} x {width}, B = {batch_size}",
        partial(make_perceptron, depth, width),
        partial(make_vectors, width),
        losses_of_classes,
        batch_size,
    )


_LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}

WORKLOADS = {
    "gpt2-1024": _language("GPT-2 small", partial(make_gpt2, 1024), 1024, 50257, 8),
    "gpt2-128": _language("GPT-2 small", partial(make_gpt2, 128), 128, 50257, 16),
    "vit": _images("ViT-B/16", make_vit, 224, 64),
    "resnet": _images("ResNet-50, GroupNorm", make_resnet, 224, 64),
    "lora": _language(
        "LoRA of rank 16, Llama 1.1B in bf16", partial(make_llama, 16, **_LLAMA), 512, 32000, 8
    ),
    "encoder": _sequences(6, 768, 256, 16),
    "mlp-4096": _vectors(8, 4096, 256),
    "mlp-512": _vectors(8, 512, 64),
    "cnn": _images("CNN of torchjd's benchmark", make_small_cnn, 32, 64),
}

# To see on any machine that everything runs.
TINY = {
    "gpt2": _language(
        "tiny GPT-2", partial(make_gpt2, 8, n_embd=16, n_layer=1, n_head=2), 8, 50, 3
    ),
    "vit": _images(
        "tiny ViT",
        partial(
            make_vit,
            **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"intermediate_size": 32, "image_size": 32},
        ),
        32,
        3,
    ),
    "resnet": _images(
        "tiny ResNet",
        partial(make_resnet, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        32,
        3,
    ),
    "lora": _language(
        "tiny LoRA",
        partial(
            make_llama,
            2,
            **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50},
        ),
        8,
        50,
        3,
    ),
    "encoder": _sequences(1, 8, 4, 3),
    "mlp": _vectors(2, 8, 4),
}
