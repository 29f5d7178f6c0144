"""Nodes of convolutions: kernel and bias, from patches of the saved input."""

from __future__ import annotations

from functools import lru_cache

from autogram.rules._nodes.registry import NodeInput, NodeRecipe, of_nodes
from autogram.rules._recipe import Formula, formula_of, positions
from autogram.rules.convolution import Convolution, per_dimension


@of_nodes("Convolution", "ConvolutionOverrideable")
def _convolution(read: NodeInput) -> NodeRecipe | None:
    """Kernel and bias of any convolution, also a transposed one. The input has no recipe."""
    space = len(read.result) - 2  # PyTorch makes a batch of a single image
    if read.position == 2:
        return NodeRecipe(formula_of(f"no{positions(space)}->o", "n"))
    if read.position != 1:
        return None
    of_call = [read.number(name) for name in ("stride", "padding", "dilation")]
    stride, padding, dilation = [per_dimension(sizes, space) for sizes in of_call]
    pads = tuple([(zeros, zeros) for zeros in padding])
    sizes = Convolution(read.shape, stride, pads, dilation, read.number("groups"))
    return NodeRecipe(_of_kernel(sizes, bool(read.number("transposed"))), ("input",))


@lru_cache(maxsize=4096)
def _of_kernel(sizes: Convolution, is_transposed: bool) -> Formula:
    blocks = sizes.transposed_blocks if is_transposed else sizes.blocks
    return Formula("n", blocks, sizes.groups)
