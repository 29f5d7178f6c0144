"""Many backward passes as one: PyTorch's vmap, without its advice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

# Nodes whose batching rule is wrong in torch 2.13, and in which cases, as `make batching` finds by
# comparing it with a loop. A further rule that is wrong belongs here, and nowhere else.
_WRONG: dict[str, Callable[[Any], bool]] = {
    # Where only the cotangent is batched.
    "CdistBackward0": lambda _: True,
    # Of a tensor without dimensions: the hidden one is rolled. Only then, or where all elements
    # are rolled as one row, there are no dimensions to roll along.
    "RollBackward0": lambda node: not getattr(node, "_saved_dims", ()),
    # Where the mask is larger than the tensor, and as large as there are cotangents.
    "MaskedSelectBackward0": lambda _: True,
}


def is_batchable(nodes: Iterable[Any]) -> bool:
    """Whether several cotangents may go through all of these nodes of a graph together."""
    for node in nodes:
        is_wrong = _WRONG.get(type(node).__name__)
        if is_wrong is not None and is_wrong(node):
            return False
    return True


T = TypeVar("T", Tensor, tuple[Tensor, ...])


def batched(function: Callable[[Tensor], T], cotangents: Tensor, nodes: Iterable[Any]) -> T:
    """``function`` of each cotangent, in one pass.

    Args:
        function: Runs a backward pass.
        cotangents: Stacked along the first dimension.
        nodes: Those of the graph that the pass may go through, and perhaps others.

    Returns:
        What it returns, stacked.

    Raises:
        RuntimeError: An operation on the way cannot be batched.
    """
    if not is_batchable(nodes):
        raise RuntimeError("PyTorch has a rule for a batched pass that is wrong.")
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise RuntimeError("The search for anomalies reads values, which a batched pass hides.")
    with warnings.catch_warnings():
        # Addressed to those who write operations, not to those who run them.
        warnings.filterwarnings("ignore", "There is a performance drop because", UserWarning)
        # Randomness occurs where a checkpoint computes again, from a seed that it restores. Under
        # vmap, dropout of a transposed tensor draws another mask from the same seed (torch 2.13).
        return torch.vmap(function, randomness="error")(cotangents)
