"""What a specimen of the zoo is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Attention = Literal["eager", "sdpa"]

DROPOUT = 0.1
CLASSES = 5


@dataclass(frozen=True)
class Specimen:
    """A model with its data and its losses.

    Attributes:
        build: Makes the model for an implementation of attention.
        make_batch: Makes a random batch of the given number of samples.
        compute_losses: Runs the model on a batch; one loss per sample ``(B,)``, or ``(B, K)``.
        sizes: Batch sizes to test. One of them equals the number of tokens (or windows), where a
            wrong guess of the batch dimension has the right shape.
        attentions: Implementations of attention to test.
        invisible: Ends of names of parameters without influence on the losses: a key bias shifts
            all scores of a query by the same amount.
    """

    build: Callable[[Attention], nn.Module]
    make_batch: Callable[[int], Batch]
    compute_losses: Callable[[nn.Module, Batch], Tensor]
    sizes: tuple[int, ...]
    attentions: tuple[Attention, ...] = ("eager", "sdpa")
    invisible: tuple[str, ...] = ()

    def make_model(self, attention: Attention) -> nn.Module:
        """Make the model in float64 and training mode, with random norms, biases and tables."""
        model = self.build(attention).double().train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        return model
