"""What is measured: models, batches and losses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.models.vision_transformer import VisionTransformer

WIDTH = 512  # of the perceptron
VOCABULARY = 8192  # of GPT-2; its own, of 50257, would leave little but the output layer to measure
CLASSES = 10

Batch = tuple[Tensor, Tensor]  # inputs and targets


@dataclass(frozen=True)
class Workload:
    """A model and the per-sample losses that it is trained on.

    Attributes:
        description: The model in words, for the table.
        make_model: Makes the model in float32, with random weights.
        make_batch: Makes a random batch of the given number of samples, in float32.
        compute_losses: Maps the model's output and the targets to losses of shape ``(B,)``.
        batch_size: Number of samples of a timed step.
        check_size: Number of samples for the errors of the Gramians.
        launches: How often processes start anew. A short step depends much on which memory the
            process happens to get.
        remarks: What is known about the error of an engine's Gramian, by the engine's name.
    """

    description: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    compute_losses: Callable[[Tensor, Tensor], Tensor]
    batch_size: int
    check_size: int = 4
    launches: int = 3
    remarks: Mapping[str, str] = field(default_factory=dict)


def _make_perceptron() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(7):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def _make_vectors(batch_size: int) -> Batch:
    return torch.randn(batch_size, WIDTH), torch.randint(WIDTH, (batch_size,))


class _LanguageModel(nn.Module):
    """GPT-2 that returns the logits alone."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=128,
            n_embd=256,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,  # torchjd runs modules a second time, so it takes no dropout
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        self.gpt2 = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``(B, T)`` to logits ``(B, T, VOCABULARY)``."""
        return self.gpt2(tokens).logits


def _make_tokens(batch_size: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (batch_size, 129))
    return tokens[:, :-1], tokens[:, 1:]


def _sequence_losses(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


def _make_vision_transformer() -> nn.Module:
    return VisionTransformer(
        image_size=32, patch_size=4, width=192, depth=6, heads=3, classes=CLASSES
    )


def _make_convolutional_network() -> nn.Module:
    layers: list[nn.Module] = []
    plan = [(3, 64, 1), (64, 64, 2), (64, 128, 1), (128, 128, 2), (128, 256, 1), (256, 256, 2)]
    for in_channels, out_channels, stride in plan:
        layers += [
            nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1),
            nn.GroupNorm(8, out_channels),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))


def _make_images(batch_size: int) -> Batch:
    return torch.randn(batch_size, 3, 32, 32), torch.randint(CLASSES, (batch_size,))


def _class_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


WORKLOADS = {
    "mlp": Workload(
        "MLP, 8 layers of width 512, B = 64",
        _make_perceptron,
        _make_vectors,
        _class_losses,
        batch_size=64,
        launches=9,
    ),
    "gpt2": Workload(
        f"GPT-2, 4 layers, width 256, 128 tokens, vocabulary {VOCABULARY}, tied, B = 8",
        _LanguageModel,
        _make_tokens,
        _sequence_losses,
        batch_size=8,
        # Without the tie, its Gramian is the true one but for the part of the position embedding,
        # in place of which every entry has the squared norm of the summed gradient.
        remarks={"torchjd": "position embedding taken as batched, no cross terms of the tie"},
    ),
    "vit": Workload(
        "Vision transformer, 6 layers, width 192, 64 patches + class token, B = 16",
        _make_vision_transformer,
        _make_images,
        _class_losses,
        batch_size=16,
    ),
    "cnn": Workload(
        "CNN, 6 convolutions up to 256 channels, GroupNorm, 32 x 32 images, B = 64",
        _make_convolutional_network,
        _make_images,
        _class_losses,
        batch_size=64,
    ),
}
