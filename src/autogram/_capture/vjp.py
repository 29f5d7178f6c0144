"""Many vector-Jacobian products through one piece of a graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Inputs = tuple[Tensor, ...] | tuple[GradientEdge, ...]


def batched_vjp(output: GradientEdge, inputs: Inputs, cotangents: Tensor) -> list[Tensor | None]:
    """Vector-Jacobian products of one output with respect to some inputs.

    Args:
        output: The edge that the cotangents are of.
        inputs: Tensors or edges.
        cotangents: ``(n, *output)``.

    Returns:
        For each input, ``(n, *input)``, or ``None`` where the output does not depend on it.
    """
    if cotangents.shape[0] > 1:
        try:
            return list(
                torch.autograd.grad(
                    [output],
                    inputs,
                    [cotangents],
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            pass  # an operation without a batching rule: one cotangent after the other
    single = [
        torch.autograd.grad([output], inputs, [g], retain_graph=True, allow_unused=True)
        for g in cotangents
    ]
    return [None if found[0] is None else torch.stack(found) for found in zip(*single, strict=True)]
