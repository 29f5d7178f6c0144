"""Blocks: the Jacobian as factors, and how they are contracted. Tensors only, no autograd."""

from autogram._blocks.arena import Arena
from autogram._blocks.block import Adjoint, Block, assemble
from autogram._blocks.bundle import Bundles, bundled, gram_of_bundle, weighted_sums
from autogram._blocks.columns import Columns, Keep
from autogram._blocks.gram import rows
from autogram._blocks.layout import (
    Folded,
    Layout,
    Partial,
    Piece,
    Placement,
    Routed,
    Scattered,
    Subset,
    agree,
    candidates,
)
from autogram._blocks.lookup import Lookup
from autogram._blocks.plan import Plan, meta
from autogram._blocks.region import Region
from autogram._blocks.scratch import Memory
from autogram._blocks.unchanged import Seen, check_unchanged

__all__ = [
    "Adjoint",
    "Arena",
    "Block",
    "Bundles",
    "Columns",
    "Folded",
    "Keep",
    "Layout",
    "Lookup",
    "Memory",
    "Partial",
    "Piece",
    "Placement",
    "Plan",
    "Region",
    "Routed",
    "Scattered",
    "Seen",
    "Subset",
    "agree",
    "assemble",
    "bundled",
    "candidates",
    "check_unchanged",
    "gram_of_bundle",
    "meta",
    "rows",
    "weighted_sums",
]
