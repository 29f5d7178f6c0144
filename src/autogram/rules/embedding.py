"""Rules of reading rows of a table: y[t] = W[v[t]], so dW[v] = sum_t [v[t] = v] g[t]."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._blocks import Layout, Lookup
from autogram.errors import UnsupportedError
from autogram.rules._recipe import Formula, Recipe, lookup, read_rows
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
    check_table("F.embedding", scale_grad_by_freq, max_norm)
    return [lookup(weight, input, None if padding_idx is None else padding_idx % len(weight))]


@register_rule(torch.embedding)
def torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001 - the signature of the torch function
) -> list[Recipe]:
    """The table of ``torch.embedding``."""
    check_table("torch.embedding", scale_grad_by_freq)
    return [lookup(weight, indices, None if padding_idx < 0 else padding_idx)]


@register_rule(torch.Tensor.__getitem__)
def getitem(input: Tensor, index: Any) -> list[Recipe] | None:
    """Rows of a tensor at integer indices; any other index is left to the fallback."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if not isinstance(index, Tensor) or index.dtype in (torch.bool, torch.uint8):
        return None
    return [lookup(input, index)]


@register_rule(*variants("index_select"))
def index_select(input: Tensor, dim: int, index: Tensor) -> list[Recipe] | None:
    """Rows of a tensor. Other dimensions are left to the fallback."""
    if dim not in (0, -input.dim()) or index.dim() != 1:
        return None
    return [lookup(input, index)]


@register_rule(F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,  # noqa: ARG001 - the signature of the torch function
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,  # noqa: ARG001
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> list[Recipe] | None:
    """The table of ``F.embedding_bag`` where it adds up rows: y[t] = sum_s w[t, s] W[v[t, s]]."""
    check_table("F.embedding_bag", scale_grad_by_freq, max_norm)
    if mode not in ("sum", "mean") or input.dim() != (2 if offsets is None else 1):
        return None
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    bags = partial(in_bags, offsets=offsets, include_last_offset=include_last_offset)
    weights = None if per_sample_weights is None else bags(per_sample_weights.detach())[0]
    saved = weighted_reads(*bags(input), weights, padding, mode == "mean", weight.dtype)
    return [Recipe((weight,), Formula("T", partial(read_bags, weight.shape[0])), saved)]


def weighted_reads(
    indices: Tensor,
    inside: Tensor,
    weights: Tensor | None,
    padding: int | None,
    is_mean: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The rows that bags add up, and each row's weight, ``(bags, longest)``.

    Args:
        indices: Row indices; arbitrary where a bag has no row.
        inside: Where a bag has a row.
        weights: Weights from the call, ``(bags, longest)``, or ``None``.
        padding: The index of a row that does not count.
        is_mean: Whether a bag is divided by the number of its rows.
        dtype: The dtype of the table.
    """
    if padding is not None:
        inside = inside & (indices != padding)
    of_rows = inside.to(torch.promote_types(dtype, torch.float32))
    if is_mean:
        of_rows = of_rows / of_rows.sum(1, keepdim=True).clamp(min=1)
    return indices, of_rows if weights is None else of_rows * weights


def read_bags(
    size: int, layout: Layout | None, cotangent: Tensor, indices: Tensor, weights: Tensor
) -> tuple[Lookup]:
    """The block of sums of rows, whose indices and weights are ``(bags, longest)``."""
    by_row = cotangent.unsqueeze(-2) * weights.unsqueeze(-1)  # (k, bags, longest, d)
    return read_rows(size, None, layout, by_row, indices)


def in_bags(
    values: Tensor, offsets: Tensor | None, include_last_offset: bool
) -> tuple[Tensor, Tensor]:
    """Values by bag, ``(bags, longest)``, zero after shorter bags; and where values are."""
    if offsets is None:
        return values, torch.ones_like(values, dtype=torch.bool)
    ends = offsets[1:]
    if include_last_offset:
        offsets = offsets[:-1]
    else:
        ends = torch.cat([ends, ends.new_full((1,), len(values))])
    longest = max([0, *(ends - offsets).tolist()])
    indices = offsets.unsqueeze(1) + torch.arange(longest, device=offsets.device)
    inside = indices < ends.unsqueeze(1)
    return torch.where(inside, values[indices.clamp(max=len(values) - 1)], 0), inside


def check_table(function: str, scale_grad_by_freq: bool, max_norm: float | None = None) -> None:
    """Refuses options that have no Jacobian."""
    if max_norm is not None:
        raise UnsupportedError(
            f"`{function}` was called with `max_norm`, which changes its weight in place in each "
            "forward pass. Remove `max_norm`, or normalise with `torch.nn.utils.parametrize`."
        )
    if scale_grad_by_freq:
        raise UnsupportedError(
            f"`{function}` was called with `scale_grad_by_freq=True`, which divides gradients by "
            "the counts of tokens in the batch: they belong to no objective. Set it to False."
        )
