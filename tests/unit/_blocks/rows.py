"""Rows of blocks in dense form, and layouts of samples along dimensions of a result."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autogram._blocks import Block, Folded, Layout, Lookup, Routed

__all__ = ["Layout", "Routed", "layouts_of", "of_each_sample", "rows_of"]


def rows_of(block: Block | Lookup, shape: Sequence[int]) -> Tensor:
    """Explicit rows ``(k, b, *shape)``."""
    if isinstance(block, Lookup):
        block = block.block(tuple(shape))
    inputs, output = block.equation.split("->")
    dtype = torch.promote_types(block.operands[0].dtype, torch.float32)
    factors = [x.to(dtype) for x in block.operands]
    rows = torch.einsum(f"{inputs}->{output.replace('1', '')}", *factors)
    k, b = block.sizes["k"], block.sizes["b"]
    assert len(block.parameter) == len(shape)
    return rows.reshape(k, b, *shape)


def layouts_of(shape: Sequence[int], dims: str, depth: int) -> Iterator[Layout]:
    """Layouts of samples along the dimensions of a result that a formula allows.

    Regular ones, with something before or behind the samples, and irregular ones.
    """
    for dim, (size, label) in enumerate(zip(shape, dims, strict=False)):
        if label != "-" and size:
            yield Folded(dim, 1, size, 1)
            if size > 2 and size % 2 == 0:
                yield Folded(dim, 2, size // 2, 1)
                yield Folded(dim, 1, 2, size // 2)
            if size > 2:
                yield _routed(dim, shape[dim : dim + 1])
    for count in range(2, depth + 1):
        if min(shape[:count]) and max(shape[:count]) > 2:
            yield _routed(0, shape[:count])


def _routed(dim: int, sizes: Sequence[int]) -> Routed:
    """Two samples in turn, and places of none."""
    numbers = torch.arange(torch.Size(sizes).numel(), device="cpu")
    return Routed(dim, 2, (numbers * 7 % 3 - 1).view(tuple(sizes)))


def of_each_sample(layout: Layout | None, cotangent: Tensor) -> list[Tensor]:
    """The cotangent of each sample, with zeros where it is of others."""
    if layout is None:
        return [cotangent]
    owners = layout.owners(cotangent[0])
    return [torch.where(owners == sample, cotangent, 0) for sample in range(layout.batch)]
