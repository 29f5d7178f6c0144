"""Gramians of trainings: of digits, of a small language model, and of several tasks at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from demo.digits import Images, load_images, make_classifier
from examples.multitask import TASKS, MultiTask, centre
from examples.text import LanguageModel, Text, losses_of, reference

BATCH = 32  # samples of a step of the training


@dataclass(frozen=True)
class Training:
    """A model, the losses of a random batch of it, and how it is trained.

    Attributes:
        model: The model.
        losses: Gives that many losses of a new batch, ``(m,)``.
        rate: The learning rate of Adam.
        batch: Gives inputs and labels of a new batch, where these are all that the losses need.
    """

    model: nn.Module
    losses: Callable[[int], Tensor]
    rate: float
    batch: Callable[[int], tuple[Tensor, Tensor]] | None = None

    def train(self, steps: int) -> None:
        """Takes steps on the mean loss."""
        optimizer = torch.optim.Adam(self.model.parameters(), self.rate)
        for _ in range(steps):
            optimizer.zero_grad()
            self.losses(BATCH).mean().backward()
            optimizer.step()


def _draw(images: Images, size: int) -> Images:
    """Random images, each moved by up to a pixel, so that no two of a batch are equal."""
    chosen = images.select(torch.randint(len(images), (size,)))
    moves = torch.randint(-1, 2, (size, 2)).tolist()
    pixels = [torch.roll(x, move, (1, 2)) for x, move in zip(chosen.pixels, moves, strict=True)]
    return Images(torch.stack(pixels), chosen.labels)


def digits() -> Training:
    """A convolutional network that classifies digits: a loss for each image."""
    model, (images, _) = make_classifier(0), load_images(0)

    def batch(m: int) -> tuple[Tensor, Tensor]:
        drawn = _draw(images, m)
        return drawn.pixels, drawn.labels

    def losses(m: int) -> Tensor:
        pixels, labels = batch(m)
        return F.cross_entropy(model(pixels), labels, reduction="none")

    return Training(model, losses, 1e-3, batch)


def letters() -> Training:
    """A transformer that reads letter by letter: a loss for each piece of a text."""
    model, text = LanguageModel(24, depth=2), Text(reference())
    return Training(model, lambda m: losses_of(model, text.draw(m)), 1e-3)


def tasks() -> Training:
    """Three tasks on one trunk: three losses for each image."""
    model, (images, _) = MultiTask(), load_images(0)

    def losses(m: int) -> Tensor:
        batch = _draw(images, -(-m // len(TASKS)))
        outputs = model(batch.pixels)
        odd = (batch.labels % 2).to(batch.pixels.dtype)
        each = [
            F.cross_entropy(outputs["class"], batch.labels, reduction="none"),
            F.binary_cross_entropy_with_logits(outputs["odd"].squeeze(1), odd, reduction="none"),
            (outputs["ink"] - centre(batch)).square().mean(1),
        ]
        return torch.stack(each, 1).flatten()[:m]

    return Training(model, losses, 3e-3)


TRAININGS = {"digits": digits, "letters": letters, "tasks": tasks}


def gramians_of(name: str, steps: int, sizes: list[int]) -> dict[int, Tensor]:
    """The Gramians ``(m, m)`` of new samples after some steps, for each m."""
    torch.manual_seed(0)
    training = TRAININGS[name]()
    training.train(steps)
    engine = Engine(training.model, batch_dim=None if name == "tasks" else 0)
    return {m: engine.compute_gramian(training.losses(m)) for m in sizes}
