"""The length of steps: the sum of the weights."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from autogram.errors import InvalidOptionError

WeightScale = Literal["method", "mean"]


def check_scale(scale: WeightScale) -> None:
    """Refuses an unknown scale."""
    if scale not in get_args(WeightScale):
        raise InvalidOptionError(f'`scale` is {scale!r}. Pass "method" or "mean".')


def scaled(weights: Tensor, scale: WeightScale) -> Tensor:
    """The weights ``(m,)``, unchanged, or for ``"mean"`` divided by their sum.

    Weights whose sum is not positive are unchanged.
    """
    if scale == "method":
        return weights
    total = weights.sum()
    return weights / torch.where(total > 0, total, 1)
