"""Comparing what formulas give with what a pass gives, where a hook on a tensor may be between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Block, Columns, Region, rows_block
from autogram._capture.autograd.cotangents import many_vjps
from autogram._capture.autograd.graph import dtypes_of
from autogram._capture.recording import Channel
from autogram._capture.tracked import Tracked


def gives_the_same(
    channel: Channel,
    derived: Tracked,
    nodes: Sequence[Any],
    columns: Columns,
    follow: Callable[[Columns], list[tuple[Tensor, Block]] | None],
) -> bool:
    """Whether formulas give what a pass does for one cotangent: no hook on a tensor changes it."""
    assert derived.edge is not None
    numbers = torch.arange(1, prod(derived.shape) + 1, dtype=torch.float64, device=derived.device)
    row = (numbers * 1.618).sin().view(1, 1, *derived.shape).to(derived.dtype)
    kernels = columns.kernels
    factors = Columns(Region.contiguous(derived.shape), kernels)
    factors.add(Region.contiguous(derived.shape), rows_block(row))
    pulled = follow(factors)
    if pulled is None:
        return False
    each = {p: Columns(Region.of_parameter(p), kernels) for p in derived.sources}
    for parameter, block in pulled:
        each[parameter].add(Region.of_parameter(parameter), block)
    shown = many_vjps(channel, derived.edge, derived.sources, row[0])
    coarsest = max([torch.finfo(x).eps for x in dtypes_of(row, nodes)])
    for found, gradient in zip(each.values(), shown, strict=True):
        rows = found.rows()
        if rows is None or gradient is None:
            return rows is None and gradient is None
        difference = torch.linalg.vector_norm(rows.flatten() - gradient.flatten().to(rows.dtype))
        if difference > coarsest**0.5 * torch.linalg.vector_norm(gradient.to(rows.dtype)):
            return False
    return True
