"""Wrong labels, found with gradients: a tenth of the digits gets another label.

A sample's value is the cosine between its gradient and the mean gradient of some clean images,
summed over the epochs: a step on a sample of negative value makes the clean images worse. This is
the influence of Pruthi et al., Estimating Training Data Influence by Tracing Gradient Descent,
2020, arXiv:2002.08484, without the lengths of the gradients. The baseline without gradients is the
loss of each sample, summed in the same way.
"""

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from demo.digits import N_CLASSES, Images, load_images, make_classifier

WRONG_SHARE = 0.1
N_CLEAN = 100
BATCH_SIZE = 32
CHUNK_SIZE = 433
N_SHOWN = 20


@dataclass(frozen=True)
class Search:
    """The images as the model saw them, and their scores.

    Attributes:
        images: Training images, a tenth of them with wrong labels.
        truth: The right labels, of shape ``(n,)``.
        values: Cosines with the mean gradient of clean images, summed over epochs, ``(n,)``.
        losses: Losses, summed over epochs, ``(n,)``.
    """

    images: Images
    truth: Tensor
    values: Tensor
    losses: Tensor

    @property
    def is_wrong(self) -> Tensor:
        """Which labels are wrong, of shape ``(n,)``."""
        return self.images.labels != self.truth


def mislabel(images: Images, seed: int) -> Images:
    """The same images, with a random tenth of the labels replaced."""
    generator = torch.Generator().manual_seed(seed)
    count = round(WRONG_SHARE * len(images))
    wrong = torch.randperm(len(images), generator=generator)[:count]
    labels = images.labels.clone()
    others = torch.randint(1, N_CLASSES, (count,), generator=generator)
    labels[wrong] = (labels[wrong] + others) % N_CLASSES
    return Images(images.pixels, labels)


def losses_of(model: nn.Module, images: Images) -> Tensor:
    """One loss for each image, of shape ``(n,)``."""
    return F.cross_entropy(model(images.pixels), images.labels, reduction="none")


def values_of(engine: Engine, model: nn.Module, images: Images, clean: Images) -> Tensor:
    """Cosine of each image's gradient with the mean gradient of the clean images, ``(n,)``."""
    means = torch.full((len(clean),), 1 / len(clean))
    direction = engine.jacobian(losses_of(model, clean)).vjp(means)
    length = torch.cat([part.flatten() for part in direction.values()]).norm()
    found = []
    for indices in torch.arange(len(images)).split(CHUNK_SIZE):
        jacobian = engine.jacobian(losses_of(model, images.select(indices)))
        lengths = jacobian.row_norms() * length
        found.append(jacobian.jvp(direction) / lengths.clamp(min=torch.finfo(lengths.dtype).tiny))
    return torch.cat(found)


def search(epochs: int, seed: int) -> Search:
    """Train on images with wrong labels, and add up the scores after each epoch."""
    training, test = load_images(seed)
    images, clean = mislabel(training, seed), test.select(torch.arange(N_CLEAN))
    model = make_classifier(seed)
    engine = Engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    values, losses = torch.zeros(len(images)), torch.zeros(len(images))
    for _ in range(epochs):
        for indices in torch.randperm(len(images), generator=generator).split(BATCH_SIZE):
            losses_of(model, images.select(indices)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        values += values_of(engine, model, images, clean)
        with torch.no_grad():
            losses += losses_of(model, images)
    return Search(images, training.labels, values, losses)


def shares_found(scores: Tensor, is_wrong: Tensor) -> Tensor:
    """The share of the wrong labels among the first 1, 2, ... n by ascending score, ``(n,)``."""
    return is_wrong[scores.argsort()].cumsum(0) / is_wrong.sum()


def make_note(found: Search) -> str:
    """Say in words what the picture shows."""
    count = int(found.is_wrong.sum())
    worst = found.is_wrong[found.values.argsort()[:N_SHOWN]].sum().item()
    by_value, by_loss = (
        shares_found(scores, found.is_wrong)[count - 1].item()
        for scores in (found.values, -found.losses)
    )
    return (
        f"{count} of {len(found.truth)} labels are wrong. Of the {N_SHOWN} images whose gradients "
        f"most oppose those of {N_CLEAN} clean images, {worst} have a wrong label. Checking as "
        f"many images as there are wrong labels finds {by_value:.0%} of these by gradients, "
        f"{by_loss:.0%} by the largest losses, and {WRONG_SHARE:.0%} by chance."
        + (
            " The limit: for labels that are wrong at random, the loss is enough. Gradients tell "
            "more: which test images a label acts on."
            if by_loss >= by_value
            else ""
        )
    )


def draw(found: Search) -> Figure:
    """The worst images with their labels, green where the label is indeed wrong."""
    figure = Figure(figsize=(6, 6.6), layout="constrained")
    panels = figure.subplots(N_SHOWN // 5, 5).flatten()
    for axes, index in zip(panels, found.values.argsort()[:N_SHOWN].tolist(), strict=True):
        axes.imshow(found.images.pixels[index, 0].tolist(), cmap="gray_r")
        label, truth = found.images.labels[index].item(), found.truth[index].item()
        axes.set_title(f"“{label}”", fontsize=15, color="#1b7837" if label != truth else "#b2182b")
        axes.set_xlabel(f"is {truth}", fontsize=12)
        axes.set(xticks=(), yticks=())
    return figure
