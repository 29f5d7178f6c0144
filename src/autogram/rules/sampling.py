"""Rules of reading an image between its pixels, such as the feature planes of a radiance field.

With c(n, u) the weight of pixel u for the place read at n, the rows of a sample are

    y[n] = sum_u c(n, u) W[u]        dW[u] = sum_n c(n, u) g[n]

with n over the places of that sample. PyTorch's own backward pass of the call computes this sum.
Given an image for each sample, it gives the rows of all samples, at the price of one backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._blocks import Block, Layout, rows_block
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
    """The images of ``F.grid_sample``, which all samples share."""
    if mode not in _MODES or padding_mode not in _PADDINGS:
        return None  # the call will raise
    return grid_sampler(input, grid, _MODES[mode], _PADDINGS[padding_mode], bool(align_corners))


@register_rule(*variants("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"))
def grid_sampler(
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> list[Recipe] | None:
    """The images of ``torch.grid_sampler``, in two or three dimensions."""
    if input.dim() not in (4, 5):
        return None
    options = interpolation_mode, padding_mode, align_corners
    blocks = partial(blocks_of_images, tuple(input.shape[2:]), options)
    return [Recipe((input,), Formula("N-TRU"[: input.dim()], blocks), (grid,))]


def blocks_of_images(
    pixels: tuple[int, ...],
    options: tuple[int, int, bool],
    layout: Layout | None,
    cotangent: Tensor,
    grid: Tensor,
) -> tuple[Block]:
    """The block of images ``(n, c, *pixels)``, if samples read places, or own whole images.

    If they read places: rows ``(k, b, n, c, *pixels)``. If each image belongs to one sample, such
    as a plane that was repeated: the gradients of images, and a mask of each sample's images.
    """
    cotangent, grid = promoted(cotangent, grid)
    given = cotangent.movedim(2, -1)  # (k, n, *places, c), as the grid is (n, *places, axes)
    labels = "nchwd"[: 2 + len(pixels)]
    if layout is not None and layout.dim == 0 and len(grid) > 1:
        rows = _gradients(pixels, options, given.unsqueeze(1), grid.unsqueeze(0)).squeeze(1)
        samples = torch.arange(layout.batch, device=grid.device).unsqueeze(1)
        is_own = samples == layout.owners(cotangent[0]).view(-1)
        return (Block(f"k{labels},bn->kb{labels}", (rows, is_own.to(rows.dtype))),)
    if layout is None:
        given, places = given.unsqueeze(1), grid.unsqueeze(0)
    else:
        dim = max(layout.dim - 1, 0)
        given = layout.split(given, dim + 1).movedim(dim + 1 + layout.has_before, 1)
        places = layout.split(grid, dim).movedim(dim + layout.has_before, 0)
    if layout is not None and layout.dim == 0:  # all read one image, whose dimension is gone
        given, places = given.unsqueeze(2), places.unsqueeze(1)
    return (rows_block(_gradients(pixels, options, given, places)),)


def _gradients(
    pixels: tuple[int, ...], options: tuple[int, int, bool], given: Tensor, places: Tensor
) -> Tensor:
    """The gradients ``(k, b, n, c, *pixels)`` of images, with one image for each objective.

    Args:
        pixels: The sizes of an image.
        options: The options of the call.
        given: The cotangents ``(k, b, n, *places, c)``.
        places: Where images are read, ``(b, n, *places, axes)``.
    """
    of_images, ones = given.shape[:3], (1,) * (len(pixels) - 1)
    given = given.flatten(3, -2).flatten(0, 2).mT.unflatten(-1, (-1, *ones))
    places = places.flatten(2, -2).flatten(0, 1).unflatten(-2, (-1, *ones))
    places = places.expand(of_images[0], *places.shape).flatten(0, 1)
    images = given.new_zeros(()).expand(*given.shape[:2], *pixels)  # their values do not matter
    backward: Any = _BACKWARD[len(pixels)]
    by_point, _ = backward(given, images, places, *options, [True, False])
    gradients: Tensor = by_point.unflatten(0, of_images)
    return gradients


_BACKWARD = {
    2: torch.ops.aten.grid_sampler_2d_backward.default,
    3: torch.ops.aten.grid_sampler_3d_backward.default,
}
