"""Expansions: shapes to which tensors may be expanded before a call, to have places of samples.

Where a call broadcasts a parameter over the samples, as attention does with a bias of learned
positions, the gradient that the call computes is a sum over the samples, and rows would take a
backward pass through the call for each. If the parameter is expanded before the call, the same
backward pass ends at the expanded tensor, in which each sample has a part of its own. The block is
its cotangent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram.rules._recipe import Formula, addend
from autogram.rules._registry import variants

Shapes = list[tuple[Tensor, tuple[int, ...]]]
"""Arguments of a call that are tensors, each with the shape to which it may be expanded."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *_: Any,
    enable_gqa: bool = False,
    **__: Any,
) -> Shapes:
    """A mask of the scores, ``(*samples, heads, positions, positions)``, and what has such samples.

    Other queries, keys and values stay as they are: expanded, they would be for another kernel.
    With ``enable_gqa``, a head of keys is for several heads of queries.
    """
    sequences, own = (query, key, value), -3 if enable_gqa else -2
    front = torch.broadcast_shapes(*[x.shape[:own] for x in sequences])
    shapes = [(x, tuple(x.shape)) for x in sequences if x.shape[:own] == front]
    if attn_mask is not None and attn_mask.dim() >= 2:
        shapes.append((attn_mask, (*front, *query.shape[own:-2], *attn_mask.shape[-2:])))
    return shapes


def elementwise(*args: Any, **kwargs: Any) -> Shapes:
    """Tensors of one dtype on one device. A single number may have another one in a call."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if "out" in kwargs or len({(x.dtype, x.device) for x in tensors}) != 1:
        return []
    shape = tuple(torch.broadcast_shapes(*[x.shape for x in tensors]))
    return [(x, shape) for x in tensors]


# Those without a rule: their derivatives are left to PyTorch.
_ELEMENTWISE = (
    "pow __pow__ __rpow__ __ipow__ float_power maximum minimum max min fmax fmin clamp clip "
    "clamp_min clamp_max lerp atan2 arctan2 hypot logaddexp logaddexp2 xlogy "
    "copysign remainder fmod ldexp"
)
_NAMES = [name + end for name in _ELEMENTWISE.split() for end in ("", "_")]
_EXPANSIONS: dict[Callable[..., Any], Callable[..., Shapes]] = {
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys(variants(*_NAMES), elementwise),
}


def find_expansion(function: Callable[..., Any]) -> Callable[..., Shapes] | None:
    """What gives the shapes for calls of a function, or ``None``."""
    return _EXPANSIONS.get(function)


def formula_of_expansion(tensor: Tensor, shape: tuple[int, ...]) -> Formula:
    """The formula of a tensor's block, from the cotangent of the tensor expanded to a shape."""
    return addend(tensor, shape).formula
