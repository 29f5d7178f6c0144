"""Many backward passes as one: PyTorch's vmap, without its advice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

# In torch 2.13, the batching rule of the backward pass of `torch.cdist` is wrong where only the
# cotangent is batched (seen by comparing it with a loop). No other such rule is known.
_WRONG = {"cdist"}
WRONG_NODES = {"CdistBackward0"}

# The user would be shown the hidden dimension.
_SHOWN_TO_THE_USER = {"retain_grad", "register_hook"}

NOT_TO_BE_BATCHED = _WRONG | _SHOWN_TO_THE_USER

T = TypeVar("T", Tensor, tuple[Tensor, ...])


def batched(function: Callable[[Tensor], T], cotangents: Tensor) -> T:
    """``function`` of each cotangent, in one pass.

    Args:
        function: Runs a backward pass.
        cotangents: Stacked along the first dimension.

    Returns:
        What it returns, stacked.

    Raises:
        RuntimeError: An operation on the way cannot be batched.
    """
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise RuntimeError("The search for anomalies reads values, which a batched pass hides.")
    with warnings.catch_warnings():
        # Addressed to those who write operations, not to those who run them.
        warnings.filterwarnings("ignore", "There is a performance drop because", UserWarning)
        # Randomness occurs where a checkpoint computes again, from a seed that it restores. Under
        # vmap, dropout of a transposed tensor draws another mask from the same seed (torch 2.13).
        return torch.vmap(function, randomness="error")(cotangents)
