"""Expansions: shapes to which tensors are expanded, so that samples have places in them.

A call may broadcast a parameter over the samples; attention does so with learned position biases.
The gradient that the call computes is then a sum over the samples, and rows would take one
backward pass through the call for each. If the parameter is expanded before the call, the same
backward pass ends at the expanded tensor, in which each sample has a separate part. The block is
its cotangent. Some calls only expand or repeat a tensor, such as the learned queries of a decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram.rules._recipe import addend
from autogram.rules._registry import variants

Shape = tuple[int, ...]
Shapes = list[tuple[Tensor, Shape]]
"""Tensor arguments of a call, each with the shape to which it may be expanded."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *_: Any,
    enable_gqa: bool = False,
    **__: Any,
) -> Shapes:
    """A mask of the scores, ``(*samples, heads, positions, positions)``, and inputs with samples.

    Other queries, keys and values stay unchanged: expanding them would select another kernel.
    With ``enable_gqa``, several heads of queries share a head of keys.
    """
    sequences, own = (query, key, value), -3 if enable_gqa else -2
    front = torch.broadcast_shapes(*[x.shape[:own] for x in sequences])
    shapes = [(x, tuple(x.shape)) for x in sequences if x.shape[:own] == front]
    if attn_mask is not None and attn_mask.dim() >= 2:
        # Also over positions: else autograd sums them before the samples, and rounds otherwise.
        scores = (*query.shape[own:-1], key.shape[-2])
        shapes.append((attn_mask, (*front, *scores)))
    return shapes


def elementwise(*args: Any, **kwargs: Any) -> Shapes:
    """Tensors of one dtype on one device. A call also accepts a single number of another dtype."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if "out" in kwargs or len({(x.dtype, x.device) for x in tensors}) != 1:
        return []
    shape = tuple(torch.broadcast_shapes(*[x.shape for x in tensors]))
    return [(x, shape) for x in tensors]


def in_float64(*args: Any, **kwargs: Any) -> Shapes:
    """Arguments of a call in float64, if all are float64: for others, it casts sums of gradients.

    For an expanded tensor, it would round each sample's part before autograd adds them up.
    """
    shapes = elementwise(*args, **kwargs)
    return shapes if all(x.dtype.to_real() == torch.float64 for x, _ in shapes) else []


def assigned(tensor: Tensor, index: Any, value: Any) -> Shapes:
    """The value that a slice of a tensor is set to."""
    if not is_of_slices(index):
        return []  # samples may have no places in listed elements
    shape = tensor.detach()[index].shape
    return [(value, tuple(torch.broadcast_shapes(value.shape, shape)))]


def is_of_slices(index: Any) -> bool:
    """Whether an index consists of numbers and slices, so that it gives a view."""
    indices = index if isinstance(index, tuple) else (index,)
    return all(x is None or x is ... or type(x) in (int, slice) for x in indices)


# Functions without a rule: PyTorch computes their derivatives.
_ELEMENTWISE = (
    "pow __pow__ __rpow__ __ipow__ maximum minimum max min fmax fmin clamp clip "
    "clamp_min clamp_max lerp atan2 arctan2 hypot logaddexp logaddexp2 xlogy "
    "copysign remainder fmod ldexp addcmul addcdiv complex polar cosine_similarity "
    "pairwise_distance"
)
# Functions that change a part of a tensor in place, which does not show as a use.
_CHANGES = "add_ sub_ mul_ div_ true_divide_ copy_ addcmul_ addcdiv_"
_NAMES = [name + end for name in _ELEMENTWISE.split() for end in ("", "_")] + _CHANGES.split()
EXPANSIONS: dict[Callable[..., Any], Callable[..., Shapes]] = {
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys((*variants(*_NAMES), torch.linalg.cross, torch.special.xlog1py), elementwise),
    **dict.fromkeys(variants("float_power", "float_power_"), in_float64),
    Tensor.__setitem__: assigned,
}
"""Functions that give the shapes for a call."""

SPREADS = {Tensor.expand, Tensor.expand_as, Tensor.repeat, *variants("broadcast_to", "tile")}
"""Functions that may do no more than expand a tensor."""


def spread_shape(
    function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
) -> Shape | None:
    """The shape to which a call expands a tensor, or ``None`` if it also repeats larger parts."""
    shape = tuple(function(torch.empty(tensor.shape, device="meta"), *args, **kwargs).shape)
    pairs = zip(reversed(shape), reversed(tensor.shape), strict=False)
    # Otherwise, samples would share a dimension with others.
    return shape if all(own in (1, size) for size, own in pairs) else None


recipe_of_expansion = addend
"""The recipe of a tensor, from the cotangent of the tensor expanded to a shape."""
