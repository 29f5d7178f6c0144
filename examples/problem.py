"""A small problem shared by the examples: points of a noisy spiral, in two classes."""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Batch:
    """Points ``(B, 2)`` and their classes ``(B,)``."""

    x: Tensor
    y: Tensor

    def losses(self, model: nn.Module) -> Tensor:
        """One loss for each point, ``(B,)``."""
        return F.cross_entropy(model(self.x), self.y, reduction="none")


def draw(size: int, *, noise: float = 0.1) -> Batch:
    """A random batch."""
    y = torch.randint(2, (size,))
    radius = torch.rand(size) + 0.2
    angle = 6 * radius + torch.pi * y
    x = radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)
    return Batch(x + noise * torch.randn(size, 2), y)


def make_model(width: int = 32) -> nn.Module:
    """A perceptron for two classes."""
    return nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )


def is_short(description: str | None) -> bool:
    """Whether the command line asks for a short run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--short", action="store_true", help="run for a few seconds, as a test")
    return bool(parser.parse_args().short)
