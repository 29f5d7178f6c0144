"""Expansions: shapes to which tensors are expanded, so that samples have places in them.

Where a call broadcasts a parameter over the samples, as attention does with a bias of learned
positions, the gradient that the call computes is a sum over the samples, and rows would take a
backward pass through the call for each. If the parameter is expanded before the call, the same
backward pass ends at the expanded tensor, in which each sample has a part of its own. The block is
its cotangent. Some calls do nothing else than to expand or to repeat a tensor, such as the queries
that a decoder learns.
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
        # Also over positions: autograd would add up these before the samples, to other last bits.
        scores = (*query.shape[own:-1], key.shape[-2])
        shapes.append((attn_mask, (*front, *scores)))
    return shapes


def elementwise(*args: Any, **kwargs: Any) -> Shapes:
    """Tensors of one dtype on one device. A single number may have another one in a call."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if "out" in kwargs or len({(x.dtype, x.device) for x in tensors}) != 1:
        return []
    shape = tuple(torch.broadcast_shapes(*[x.shape for x in tensors]))
    return [(x, shape) for x in tensors]


def in_float64(*args: Any, **kwargs: Any) -> Shapes:
    """Tensors that a call casts to float64, if they have it: of others, it casts sums of gradients.

    Of an expanded tensor, it would round the part of each sample before autograd adds them up.
    """
    shapes = elementwise(*args, **kwargs)
    return shapes if all(x.dtype.to_real() == torch.float64 for x, _ in shapes) else []


def assigned(tensor: Tensor, index: Any, value: Any) -> Shapes:
    """What a slice of a tensor is set to."""
    if not is_of_slices(index):
        return []  # samples may have no places in the elements that are listed
    shape = tensor.detach()[index].shape
    return [(value, tuple(torch.broadcast_shapes(value.shape, shape)))]


def is_of_slices(index: Any) -> bool:
    """Whether an index of a tensor has numbers and slices alone, so that it gives a view."""
    indices = index if isinstance(index, tuple) else (index,)
    return all(x is None or x is ... or type(x) in (int, slice) for x in indices)


# Those without a rule: their derivatives are left to PyTorch.
_ELEMENTWISE = (
    "pow __pow__ __rpow__ __ipow__ maximum minimum max min fmax fmin clamp clip "
    "clamp_min clamp_max lerp atan2 arctan2 hypot logaddexp logaddexp2 xlogy "
    "copysign remainder fmod ldexp addcmul addcdiv complex polar cosine_similarity "
    "pairwise_distance"
)
# Those that change a part of a tensor in place, which shows no use of its own.
_CHANGES = "add_ sub_ mul_ div_ true_divide_ copy_ addcmul_ addcdiv_"
_NAMES = [name + end for name in _ELEMENTWISE.split() for end in ("", "_")] + _CHANGES.split()
EXPANSIONS: dict[Callable[..., Any], Callable[..., Shapes]] = {
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys((*variants(*_NAMES), torch.linalg.cross, torch.special.xlog1py), elementwise),
    **dict.fromkeys(variants("float_power", "float_power_"), in_float64),
    Tensor.__setitem__: assigned,
}
"""What gives the shapes for calls of a function."""

SPREADS = {Tensor.expand, Tensor.expand_as, Tensor.repeat, *variants("broadcast_to", "tile")}
"""Functions that may do nothing else than to expand a tensor."""


def spread_shape(
    function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
) -> Shape | None:
    """The shape to which a call expands a tensor, or ``None`` if it also repeats larger parts."""
    shape = tuple(function(torch.empty(tensor.shape, device="meta"), *args, **kwargs).shape)
    pairs = zip(reversed(shape), reversed(tensor.shape), strict=False)
    # Else samples would share a dimension with others.
    return shape if all(own in (1, size) for size, own in pairs) else None


recipe_of_expansion = addend
"""The recipe of a tensor, for the cotangent of the tensor expanded to a shape."""
