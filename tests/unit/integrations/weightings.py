"""Weightings that trainers are given."""

import torch
from torch import Tensor


def weighting(gramian: Tensor) -> Tensor:
    """Different for each objective, and dependent on the others."""
    places = torch.arange(1, len(gramian) + 1, device=gramian.device)
    return gramian.diagonal().rsqrt() * places / len(gramian)


def mean(gramian: Tensor) -> Tensor:
    """That of the losses."""
    return gramian.new_full((len(gramian),), 1 / len(gramian))
