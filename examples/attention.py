"""Where a vision transformer looks: attention maps, weighted by their gradients.

The relevance of the patches for one class is passed from block to block. With A the attention maps
of a block's heads, and dA the gradient of the class score,

    R <- R + mean over heads of max(A * dA, 0) @ R,  starting at the identity.

Chefer, Gur and Wolf, Generic Attention-model Explainability, 2021, arXiv:2103.15679. Without the
gradients, this is the rollout of Abnar and Zuidema, Quantifying Attention Flow in Transformers,
2020, arXiv:2005.00928.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram.hooks import capture
from demo.digits import N_CLASSES, Images, load_images
from examples.problem import is_short

SIDE, PATCH = 8, 2
N_PATCHES = (SIDE // PATCH) ** 2


class Attention(nn.Module):
    """Multi-head self-attention. The softmax is a module, so that it can be captured."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.maps = nn.Softmax(-1)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes tokens ``(b, t, width)``."""
        b, t, d = x.shape
        q, k, v = self.project(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        maps = self.maps(q @ k.mT / (d / self.heads) ** 0.5)  # (b, heads, t, t)
        mixed: Tensor = self.out((maps @ v).transpose(1, 2).reshape(b, t, d))
        return mixed


class Block(nn.Module):
    """Attention, then two linear layers, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Changes tokens ``(b, t, width)``."""
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.mlp(x)
        return out


class VisionTransformer(nn.Module):
    """Class scores of images ``(b, 1, 8, 8)``, from 16 patches and a class token."""

    def __init__(self, width: int = 48, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + N_PATCHES, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, N_CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(b, 10)``."""
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        scores: Tensor = self.head(self.blocks(x)[:, 0])
        return scores


def train(model: nn.Module, images: Images, epochs: int) -> None:
    """Trains with Adam and small shifts of the images."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(epochs):
        for some in torch.randperm(len(images)).split(64):
            shifts = torch.randint(-1, 2, (2,)).tolist()
            pixels = images.pixels[some].roll(shifts, (2, 3))
            optimizer.zero_grad()
            F.cross_entropy(model(pixels), images.labels[some]).backward()
            optimizer.step()


def relevance(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """How much each patch matters for the score of a class, ``(b, 4, 4)``.

    One backward pass for all images: each score depends on its own image alone.
    """
    with capture(model, where="blocks.*.attention.maps", inputs=False) as calls:
        model(pixels).gather(1, classes.unsqueeze(1)).sum().backward()
    model.zero_grad()
    total = torch.eye(1 + N_PATCHES).repeat(len(pixels), 1, 1)
    for (call,) in calls.values():  # block after block
        weighted = (call.output * call.grad_output).clamp(min=0).mean(1)  # (b, t, t)
        total = total + weighted @ total
    side = SIDE // PATCH
    return total[:, 0, 1:].view(-1, side, side)  # relevance of each patch for the class token


def score_without(model: nn.Module, images: Images, order: Tensor, count: int) -> float:
    """The mean probability of the right class, with the first `count` patches of an order blank."""
    side = SIDE // PATCH
    hidden = torch.zeros(len(images), N_PATCHES).scatter(1, order[:, :count], 1.0)
    mask = F.interpolate(hidden.view(-1, 1, side, side), scale_factor=PATCH)
    with torch.no_grad():
        probabilities = model(images.pixels * (1 - mask)).softmax(1)
    return float(probabilities.gather(1, images.labels.unsqueeze(1)).mean())


def save_picture(path: Path, pixels: Tensor, relevances: Tensor, labels: Tensor) -> None:
    """Draws digits, and over each the relevance of its patches."""
    from matplotlib.figure import Figure  # only for the picture

    figure = Figure(figsize=(1.2 * len(pixels), 2.7), layout="constrained")
    axes = figure.subplots(2, len(pixels))
    for i, (image, found) in enumerate(zip(pixels, relevances, strict=True)):
        large = F.interpolate(found[None, None], size=(SIDE, SIDE), mode="bilinear")[0, 0]
        for row in axes[:, i]:
            row.imshow(image[0].numpy(), cmap="gray_r")
            row.set_axis_off()
        axes[1, i].imshow(large.numpy(), cmap="inferno", alpha=0.75)
        axes[0, i].set_title(str(int(labels[i])))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(*, short: bool, picture: Path) -> None:
    """Trains, explains the test images, and checks that hiding relevant patches matters more."""
    torch.manual_seed(0)
    training, test = load_images(seed=0)
    model = VisionTransformer()
    train(model, training, epochs=1 if short else 60)
    with torch.no_grad():
        right = float((model(test.pixels).argmax(1) == test.labels).float().mean())
    found = relevance(model, test.pixels, test.labels)
    print(f"{right:.1%} of the test images are classified correctly.")
    by_relevance = found.flatten(1).argsort(1, descending=True)
    orders = {"4 most relevant": by_relevance, "4 least relevant": by_relevance.flip(1)}
    orders["4 random"] = torch.rand(found.shape).flatten(1).argsort(1)
    for name, order in orders.items():
        score = score_without(model, test, order, 4)
        print(f"Without the {name} of 16 patches, the right class gets {score:.1%}.")
    shown = [int((test.labels == c).nonzero()[0]) for c in range(N_CLASSES)]
    save_picture(picture, test.pixels[shown], found[shown], test.labels[shown])
    print(f"Picture saved to {picture}.")


if __name__ == "__main__":
    is_quick = is_short(__doc__)
    main(short=is_quick, picture=Path("build/examples/attention.png"))
