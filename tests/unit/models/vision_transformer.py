"""A vision transformer with the structure of torchvision's, on `nn.MultiheadAttention`.

Three things in it are hard for an engine: a class token and a position embedding that belong to the
root module, which also has children; the class token, which is expanded along the batch before
any batched tensor meets it; and attention, which folds the samples with the tokens in an order of
its own.
"""

import torch
from torch import Tensor, nn


class EncoderBlock(nn.Module):
    """One pre-norm encoder block: attention and a perceptron, each behind a residual connection."""

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, *, batch_first: bool = True
    ) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(
            width, heads, dropout=dropout, batch_first=batch_first
        )
        self.dropout = nn.Dropout(dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, T, width)``, or ``(T, B, width)``, to the same shape."""
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + self.dropout(y)
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    """Classifier of square images by their patches.

    Args:
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch, in pixels.
        width: Number of features of a token.
        depth: Number of encoder blocks.
        heads: Number of attention heads.
        classes: Number of classes.
        dropout: Probability of every dropout, also the one inside the attention.
        batch_first: Whether the blocks run on ``(B, T, width)`` rather than ``(T, B, width)``.
    """

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
        dropout: float = 0.0,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        patches = (image_size // patch_size) ** 2
        self.batch_first = batch_first
        self.conv_proj = nn.Conv2d(3, width, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            *(EncoderBlock(width, heads, dropout, batch_first=batch_first) for _ in range(depth))
        )
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(B, 3, image_size, image_size)`` to logits ``(B, classes)``."""
        x = self.conv_proj(images).flatten(2).transpose(1, 2)  # (B, patches, width)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.dropout(x + self.pos_embedding)
        if self.batch_first:
            token = self.ln(self.layers(x))[:, 0]
        else:
            token = self.ln(self.layers(x.transpose(0, 1)))[0]
        return self.head(token)
