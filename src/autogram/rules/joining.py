"""Rules of joining tensors: the block of each tensor is its part of the cotangent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from autogram.rules._recipe import Recipe, positions, product
from autogram.rules._registry import register_rule, variants


@register_rule(*variants("cat", "concat", "concatenate"), holds_for_complex=True)
def cat(tensors: Sequence[Tensor], dim: int = 0, *, axis: int | None = None) -> list[Recipe] | None:
    """Tensors joined along a dimension that cannot hold samples."""
    dim = (dim if axis is None else axis) % tensors[0].dim()
    output = positions(tensors[0].dim())
    dims = output[:dim] + "-" + output[dim + 1 :]
    recipes, start = [], 0
    for tensor in tensors:
        if tensor.dim() != tensors[0].dim():  # torch also joins empty 1-d tensors to any others
            return None
        part = partial(_part, dim + 1, start, tensor.shape[dim])
        recipes.append(product(tensor, f"{output}->{output}", prepare=part, dims=dims))
        start += tensor.shape[dim]
    return recipes


@register_rule(*variants("stack"), holds_for_complex=True)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> list[Recipe]:
    """Tensors joined along a new dimension, which cannot hold samples."""
    dim %= tensors[0].dim() + 1
    output = positions(tensors[0].dim())
    dims = output[:dim] + "-" + output[dim:]
    return [
        product(tensor, f"{output}->{output}", prepare=partial(_slice, dim + 1, i), dims=dims)
        for i, tensor in enumerate(tensors)
    ]


def _part(dim: int, start: int, length: int, cotangent: Tensor) -> tuple[Tensor]:
    return (cotangent.narrow(dim, start, length),)


def _slice(dim: int, place: int, cotangent: Tensor) -> tuple[Tensor]:
    return (cotangent.select(dim, place),)
