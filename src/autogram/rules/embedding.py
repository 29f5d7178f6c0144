"""Rules of reading rows of a table: y[t] = W[v[t]], so dW[v] = sum_t [v[t] = v] g[t]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._errors import UnsupportedError
from autogram.rules._recipe import Recipe, lookup
from autogram.rules._registry import register_rule, variants


@register_rule(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001 - the signature of the torch function
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001
) -> list[Recipe]:
    """The table of ``F.embedding``."""
    if max_norm is not None:
        raise UnsupportedError(
            "`F.embedding` was called with `max_norm`, which changes its weight in place during "
            "the forward pass, so that two forward passes have different Jacobians. Remove "
            "`max_norm`, or normalise with `torch.nn.utils.parametrize`."
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return torch_embedding(weight, input, padding, scale_grad_by_freq)


@register_rule(torch.embedding)
def torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001 - the signature of the torch function
) -> list[Recipe]:
    """The table of ``torch.embedding``."""
    if scale_grad_by_freq:
        raise UnsupportedError(
            "`F.embedding` was called with `scale_grad_by_freq=True`, which divides gradients by "
            "how often a token occurs in the whole batch: what comes out is the gradient of no "
            "objective. Set it to False."
        )
    return [lookup(weight, indices, None if padding_idx < 0 else padding_idx)]


@register_rule(torch.Tensor.__getitem__)
def getitem(input: Tensor, index: Any) -> list[Recipe] | None:
    """Rows of a tensor at integer places; any other index is left to the fallback."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if not isinstance(index, Tensor) or index.dtype in (torch.bool, torch.uint8):
        return None
    return [lookup(input, index)]


@register_rule(*variants("index_select"))
def index_select(input: Tensor, dim: int, index: Tensor) -> list[Recipe] | None:
    """Rows of a tensor; other dimensions are left to the fallback."""
    if dim not in (0, -input.dim()) or index.dim() != 1:
        return None
    return [lookup(input, index)]
