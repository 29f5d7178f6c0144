"""Nodes of reading an image between its pixels."""

from __future__ import annotations

from functools import lru_cache, partial

from autogram.rules._nodes.registry import NodeInput, NodeRecipe, of_nodes
from autogram.rules._recipe import Formula
from autogram.rules.sampling import blocks_of_images


@of_nodes("GridSampler2D", "GridSampler3D")
def _grid_sampler(read: NodeInput) -> NodeRecipe | None:
    """The images, which all samples share. The places have no recipe."""
    if read.position:
        return None
    options = [read.number(x) for x in ("interpolation_mode", "padding_mode", "align_corners")]
    return NodeRecipe(_of_images(read.shape[2:], *options), ("grid",))


@lru_cache(maxsize=4096)
def _of_images(
    pixels: tuple[int, ...], interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Formula:
    options = interpolation_mode, padding_mode, align_corners
    dims = "N-TRU"[: 2 + len(pixels)]
    return Formula(dims, partial(blocks_of_images, pixels, options))
