"""Ways to train one model, with timed steps."""

from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from autogram import Engine
from autogram.weightings import UPGrad
from demo.digits import Images


@dataclass(frozen=True)
class Backward:
    """Result of one backward pass.

    Attributes:
        weights: Weights of the losses, of shape ``(m,)``.
        gramian_s: Seconds spent on the Gramian, where it is computed separately.
        weighting_s: Seconds spent on the weights.
    """

    weights: Tensor
    gramian_s: float = 0.0
    weighting_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """Result of one training step: its backward pass, and the seconds of the whole step."""

    backward: Backward
    total_s: float


class Training(ABC):
    """A model in training. A subclass turns the losses of a batch into a gradient.

    Args:
        model: Copied, so that several trainings can start from the same weights.
        learning_rate: Learning rate of gradient descent without momentum or weight decay.
    """

    name: ClassVar[str]

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.model = deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self.steps: list[Step] = []

    @property
    def title(self) -> str:
        """The name, with the learning rate."""
        return f"{self.name}, rate {self.learning_rate:g}"

    def step(self, images: Images) -> None:
        """Descend once on a batch, and record the step."""
        start = perf_counter()
        losses = F.cross_entropy(self.model(images.pixels), images.labels, reduction="none")  # (m,)
        backward = self.backward(losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append(Step(backward, perf_counter() - start))

    @abstractmethod
    def backward(self, losses: Tensor) -> Backward:
        """Accumulate one gradient from the losses of a batch, of shape ``(m,)``."""


class GradientDescent(Training):
    """Plain SGD: the gradient of the mean loss."""

    name = "SGD on the mean loss"

    @override
    def backward(self, losses: Tensor) -> Backward:
        losses.mean().backward()
        return Backward(torch.full_like(losses, 1 / len(losses)))


def as_long_as_the_mean(weights: Tensor, gramian: Tensor) -> Tensor:
    """Weights, scaled so that the step is as long as one along the mean gradient."""
    return weights * (gramian.mean() / (weights @ gramian @ weights)).clamp(min=0).sqrt()


class JacobianDescent(Training):
    """Jacobian descent: combines the samples' gradients so that it conflicts with none of them.

    Its steps are as long as those along the mean gradient, so that rates can be compared.
    """

    name = "Jacobian descent"

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__(model, learning_rate)
        self.engine = Engine(self.model, batch_dim=0)
        self.projection = UPGrad()

    def weighting(self, gramian: Tensor) -> Tensor:
        """Weights of the losses, from their Gramian."""
        return as_long_as_the_mean(self.projection(gramian), gramian)

    @override
    def backward(self, losses: Tensor) -> Backward:
        start = perf_counter()
        gramian = self.engine.compute_gramian(losses)  # (m, m)
        gramian_end = perf_counter()
        weights = self.weighting(gramian)  # (m,)
        weighting_end = perf_counter()
        losses.backward(weights)
        return Backward(weights, gramian_end - start, weighting_end - gramian_end)
