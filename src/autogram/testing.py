"""Tools to test against plain autograd."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from autogram._rule_check import check_rule

__all__ = ["check_rule", "reference_jacobian"]


def reference_jacobian(losses: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """The Jacobian by plain autograd, one objective at a time.

    Args:
        losses: Objectives, any shape with m elements. Their graph is kept.
        parameters: Tensors with n elements in total, in the order of the columns. Those that do
            not require a gradient are left out.

    Returns:
        ``(m, n)``, with rows in the row-major order of the losses, and zeros for parameters that
        an objective does not depend on.

        Cost: m backward passes.
    """
    trainable = [p for p in parameters if p.requires_grad]
    rows = []
    for loss in losses.flatten():
        gradients = torch.autograd.grad(
            loss, trainable, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([gradient.to_dense().flatten() for gradient in gradients]))
    return torch.stack(rows)
