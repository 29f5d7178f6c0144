"""What a specimen of the zoo is, and how one is made from a configuration of transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.unit.environment import DEVICE

Batch = dict[str, Tensor]
Attention = Literal["eager", "sdpa"]
Build = Callable[[Attention], nn.Module]
ComputeLosses = Callable[[nn.Module, Batch], Tensor]

DROPOUT = 0.1
CLASSES = 5


def from_config(model: str, **fields: Any) -> Build:
    """A factory of a model of transformers with random weights: nothing is downloaded.

    Args:
        model: The name of its class.
        fields: Fields of its configuration, beside the implementation of attention.
    """

    def build(attention: Attention) -> nn.Module:
        model_class = getattr(transformers, model)
        config = model_class.config_class(**fields, attn_implementation=attention)
        return model_class(config)

    return build


def in_float64(compute_losses: ComputeLosses) -> ComputeLosses:
    """Losses of a model whose code reads parameters in float32, computed in float64 throughout.

    Rounded to float32, small shares of the Gramian would be below the error of the others.
    """

    @wraps(compute_losses)
    def compute(model: nn.Module, batch: Batch) -> Tensor:
        with mock.patch.object(Tensor, "float", Tensor.double):
            return compute_losses(model, batch)

    return compute


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
        is_random: Whether two forward passes over one batch differ, by dropout or random masks.
        dtype: Of the parameters: float64, unless the model calls a function that has none.
    """

    build: Build
    make_batch: Callable[[int], Batch]
    compute_losses: ComputeLosses
    sizes: tuple[int, ...]
    attentions: tuple[Attention, ...] = ("eager", "sdpa")
    invisible: tuple[str, ...] = ()
    is_random: bool = True
    dtype: torch.dtype = torch.float64

    def make_model(self, attention: Attention) -> nn.Module:
        """Make the model in training mode, with random norms, biases and tables.

        Batch normalisation is in evaluation mode, or it would couple the samples.
        """
        model = self.build(attention).to(DEVICE, self.dtype).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
        return model
