"""Nodes of convolutions: kernel and bias, from patches of the saved input."""

from __future__ import annotations

from functools import lru_cache

from autogram.rules._recipe import Formula, formula_of, positions
from autogram.rules.convolution import Convolution
from autogram.rules.nodes.registry import NodeInput, NodeRecipe, of_nodes


@of_nodes("Convolution", "ConvolutionOverrideable")
def _convolution(read: NodeInput) -> NodeRecipe | None:
    """Kernel and bias of any convolution, also a transposed one. The input has no recipe."""
    stride = tuple(read.number("stride"))
    is_batched = len(read.result) == len(stride) + 2
    dims = "n" if is_batched else "-"
    if read.position == 2:
        batch = "n" if is_batched else ""
        return NodeRecipe(formula_of(f"{batch}o{positions(len(stride))}->o", dims))
    if read.position != 1:
        return None
    pads = tuple([(zeros, zeros) for zeros in read.number("padding")])
    others = tuple(read.number("dilation")), read.number("groups")
    sizes = Convolution(read.shape, stride, pads, *others)
    return NodeRecipe(_of_kernel(sizes, dims, bool(read.number("transposed"))), ("input",))


@lru_cache(maxsize=4096)
def _of_kernel(sizes: Convolution, dims: str, is_transposed: bool) -> Formula:
    blocks = sizes.transposed_blocks if is_transposed else sizes.blocks
    return Formula(dims, blocks, sizes.groups)
