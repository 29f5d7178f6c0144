"""Rules of reading an image between its pixels, as of the feature planes of a radiance field.

With c(n, u) the weights of the pixels u for the place that is read at n, the rows of a sample are

    y[n] = sum_u c(n, u) W[u]        dW[u] = sum_n c(n, u) g[n]

with n over the places of that sample. PyTorch's own backward pass of the call adds this up. Given
an image for each sample, it gives the rows of all samples, at the price of one backward pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._blocks import Block, Layout
from autogram.rules._recipe import Formula, Recipe, promoted
from autogram.rules._registry import register_rule, variants

_MODES = {"bilinear": 0, "nearest": 1, "bicubic": 2}
_PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}


@register_rule(F.grid_sample)
def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> list[Recipe] | None:
    """The images of ``F.grid_sample``, which all samples read."""
    if mode not in _MODES or padding_mode not in _PADDINGS:
        return None  # the call is going to raise
    return grid_sampler(input, grid, _MODES[mode], _PADDINGS[padding_mode], bool(align_corners))


@register_rule(*variants("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"))
def grid_sampler(
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> list[Recipe] | None:
    """The images of ``torch.grid_sampler``, flat or in space."""
    if input.dim() not in (4, 5):
        return None
    is_shared = input.shape[0] == 1 or input.stride(0) == 0
    dims = ("S" if is_shared else "-") + "-TRU"[: input.dim() - 1]
    options = interpolation_mode, padding_mode, align_corners
    blocks = partial(_rows, tuple(input.shape[2:]), is_shared, options)
    return [Recipe((input,), Formula(dims, blocks), (grid,))]


def _rows(
    pixels: tuple[int, ...],
    is_shared: bool,
    options: tuple[int, int, bool],
    layout: Layout | None,
    cotangent: Tensor,
    grid: Tensor,
) -> tuple[Block]:
    """The rows of images of some pixels: of one, if all results read the same one."""
    cotangent, grid = promoted(cotangent, grid)
    given = cotangent.movedim(2, -1)  # (k, n, *places, c), as the grid is (n, *places, axes)
    if layout is None:
        given, places = given.unsqueeze(1), grid.unsqueeze(0)
    else:
        layout = replace(layout, dim=max(layout.dim - 1, 0))
        dim = layout.dim + layout.has_before
        given = layout.split(given, layout.dim + 1).movedim(dim + 1, 1)
        places = layout.split(grid, layout.dim).movedim(dim, 0)
    front = 1 if is_shared else 2  # in front of what are places of one image
    given, places = given.flatten(front + 1, -2), places.flatten(front, -2)
    of_images, ones = given.shape[: front + 1], (1,) * (len(pixels) - 1)
    given = given.flatten(0, front).mT.unflatten(-1, (-1, *ones))
    places = places.flatten(0, front - 1).unflatten(-2, (-1, *ones))
    places = places.expand(of_images[0], *places.shape).flatten(0, 1)
    images = given.new_zeros(()).expand(*given.shape[:2], *pixels)  # their values do not matter
    backward: Any = _BACKWARD[len(pixels)]
    rows, _ = backward(given, images, places, *options, [True, False])
    labels = "nchwd"[: len(rows.shape)]
    image = "1" + labels[1:] if is_shared else labels
    return (
        Block(f"kb{image.removeprefix('1')}->kb{image}", (rows.view(*of_images, *rows.shape[1:]),)),
    )


_BACKWARD = {
    2: torch.ops.aten.grid_sampler_2d_backward.default,
    3: torch.ops.aten.grid_sampler_3d_backward.default,
}
