"""Blocks: the Jacobian as factors, and their contraction. Tensors only, no autograd."""

from autogram._blocks.block import Adjoint, Block, block_of_equation, joined, rows_block
from autogram._blocks.bundle import (
    Bundles,
    Rows,
    bundled,
    form_in_bundle,
    gram_of_bundle,
    in_places,
    side_by_side,
    weighted_sums,
)
from autogram._blocks.columns import Columns, Keep, Room
from autogram._blocks.kernels import Arena, Devices, Kernels, Limit, Memory
from autogram._blocks.layout import (
    Folded,
    Layout,
    Partial,
    Placement,
    Routed,
    Scattered,
    Subset,
    candidates,
    pieces,
)
from autogram._blocks.lookup import Factors, Lookup, block_of, is_of_lookup
from autogram._blocks.plan import cost_of_products, cost_of_rows, gains_by_rows
from autogram._blocks.products import explicit
from autogram._blocks.programs import (
    QUESTIONS,
    Program,
    are_plain,
    forms,
    settings_now,
    written_down,
)
from autogram._blocks.region import Region, as_real, in_numbers_of, overlap
from autogram._blocks.sketch import Projection, projected
