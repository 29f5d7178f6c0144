"""Blocks: the Jacobian as factors, and how they are contracted. Tensors only, no autograd."""

from autogram._blocks.block import Adjoint, Block, block_of_equation, joined, rows_block
from autogram._blocks.bundle import (
    Bundles,
    bundled,
    gram_of_bundle,
    in_places,
    side_by_side,
    weighted_sums,
)
from autogram._blocks.columns import Columns, Keep, Room
from autogram._blocks.kernels import Arena, Devices, Kernels, Limit
from autogram._blocks.layout import (
    Folded,
    Layout,
    Partial,
    Placement,
    Routed,
    Scattered,
    Subset,
    agree,
    candidates,
    pieces,
)
from autogram._blocks.lookup import Factors, Lookup, block_of
from autogram._blocks.plan import cost_of_products, cost_of_rows
from autogram._blocks.products import largest_result
from autogram._blocks.region import Region
from autogram._blocks.sketch import Projection, projected

__all__ = [
    "Adjoint",
    "Arena",
    "Block",
    "Bundles",
    "Columns",
    "Devices",
    "Factors",
    "Folded",
    "Keep",
    "Kernels",
    "Layout",
    "Limit",
    "Lookup",
    "Partial",
    "Placement",
    "Projection",
    "Region",
    "Room",
    "Routed",
    "Scattered",
    "Subset",
    "agree",
    "block_of",
    "block_of_equation",
    "bundled",
    "candidates",
    "cost_of_products",
    "cost_of_rows",
    "gram_of_bundle",
    "in_places",
    "joined",
    "largest_result",
    "pieces",
    "projected",
    "rows_block",
    "side_by_side",
    "weighted_sums",
]
