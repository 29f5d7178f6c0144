"""Measures a model between two epochs, in the same way for every kind of training."""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from demo.digits import Images, first_of_each_class

N_PER_CLASS = 10


@dataclass(frozen=True)
class Look:
    """Measurements of one model at one moment.

    Attributes:
        loss: Mean loss of all training images.
        accuracy: Share of test images whose true class has the highest score.
        conflicts: Share of the pairs of different samples whose gradients have a negative inner
            product.
        cosines: Cosines of the angles between the samples' gradients, of shape ``(m, m)``, the
            samples sorted by class.
    """

    loss: float
    accuracy: float
    conflicts: float
    cosines: Tensor


class Probe:
    """Measures models of one architecture.

    It copies the weights into a twin, which has its own engine. The model that is
    trained, and timed, therefore carries no hooks that its training does not need.

    Args:
        model: Copied; its weights do not matter.
        training: Training images: measures their mean loss, and the gradients of a few per class.
        test: Images that no training sees.
    """

    def __init__(self, model: nn.Module, training: Images, test: Images) -> None:
        self.twin = deepcopy(model)
        self.engine = Engine(self.twin, batch_dim=0)
        self.training = training
        self.test = test
        self.samples = first_of_each_class(training, N_PER_CLASS)

    def look(self, model: nn.Module) -> Look:
        """Measure a model without changing it."""
        self.twin.load_state_dict(model.state_dict())
        with torch.no_grad():
            loss = self._losses(self.training).mean()
            scores = self.twin(self.test.pixels)  # (n, classes)
        gramian = self.engine.compute_gramian(self._losses(self.samples))  # (m, m)
        return Look(
            loss=loss.item(),
            accuracy=(scores.argmax(1) == self.test.labels).double().mean().item(),
            conflicts=share_of_conflicts(gramian),
            cosines=cosines(gramian),
        )

    def _losses(self, images: Images) -> Tensor:
        return F.cross_entropy(self.twin(images.pixels), images.labels, reduction="none")


def share_of_conflicts(gramian: Tensor) -> float:
    """Share of the pairs i < j with a negative entry of the Gramian, of shape ``(m, m)``."""
    m = len(gramian)
    return (gramian.triu(1) < 0).sum().item() / (m * (m - 1) / 2)


def cosines(gramian: Tensor) -> Tensor:
    """The Gramian of the gradients scaled to length one, of shape ``(m, m)``."""
    lengths = gramian.diagonal().sqrt()
    # A gradient of length zero has no direction: its cosines are zero, not undefined.
    lengths = lengths.clamp(min=torch.finfo(gramian.dtype).tiny)
    return gramian / lengths / lengths.unsqueeze(1)
