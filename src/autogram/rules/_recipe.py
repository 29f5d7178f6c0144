"""Recipes: what a rule answers, for each tensor that a call reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from autogram._blocks import Adjoint, Block, Layout, Lookup, Region, assemble
from autogram._errors import RuleError

POSITIONS = "TSRUVWXYZ"

Prepare = Callable[..., tuple[Tensor, ...]]


class Form(Protocol):
    """A block in the making: all of it but the tensors."""

    @property
    def dims(self) -> str:
        """An index for each dimension of the output that may hold the samples, else ``-``."""
        ...

    def block(self, layout: Layout | None, cotangent: Tensor, *saved: Tensor) -> Block | Lookup:
        """The block, from the cotangent ``(k, *output)`` and the saved tensors."""
        ...

    def region(self, region: Region) -> Region:
        """The region of the operand, with the dimensions that the block has."""
        ...


class Recipe(NamedTuple):
    """The block of one tensor that a call reads.

    Attributes:
        operand: The tensor, as it was passed to the call.
        form: How its block is made from the cotangent and the saved tensors.
        saved: The tensors to keep until the backward pass. Keep nothing that is not needed.
        output: Which tensor of the call's results the block is by way of.
    """

    operand: Tensor
    form: Form
    saved: tuple[Tensor, ...] = ()
    output: int = 0

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensor, as the only one."""
        return (self.operand,)


class JointForm(Protocol):
    """The blocks of several operands in the making, where they are computed together."""

    @property
    def dims(self) -> str:
        """An index for each dimension of the output that may hold the samples, else ``-``."""
        ...

    def blocks(
        self, layout: Layout | None, cotangent: Tensor, *saved: Tensor
    ) -> Iterable[Block | Lookup]:
        """The block of each operand, from the cotangent ``(k, *output)`` and what was saved."""
        ...


class JointRecipe(NamedTuple):
    """The blocks of several tensors that a call reads, where they are computed together.

    Attributes:
        operands: The tensors, as they were passed to the call. Some may not be tracked.
        form: How their blocks are made from the cotangent and the saved tensors.
        saved: The tensors to keep until the backward pass.
        output: Which tensor of the call's results the blocks are by way of.
    """

    operands: tuple[Tensor, ...]
    form: JointForm
    saved: tuple[Tensor, ...] = ()
    output: int = 0


def product(
    operand: Tensor,
    equation: str,
    *saved: Tensor,
    prepare: Prepare | None = None,
    dims: str | None = None,
    groups: int | None = None,
    scale: float = 1,
    output: int = 0,
    gradient: Callable[..., Tensor] | None = None,
) -> Recipe:
    """The recipe of a block that is an einsum of the cotangent and saved tensors.

    Args:
        operand: The tensor that the block belongs to.
        equation: Indices of the cotangent, then of each factor, then (after the arrow) of the
            operand's dimensions: ``"to,ti->oi"`` for the weight of a linear layer. An operand's
            dimension of size one may be written ``1``. The letters ``k`` and ``b`` are taken.
        saved: Tensors to keep. They are the factors, if ``prepare`` is ``None``.
        prepare: Makes the cotangent and the factors from ``(cotangent, *saved)``. It must not
            hold tensors, and the cotangent has a leading dimension for the objectives.
        dims: The index of each dimension of the call's output, ``-`` where no samples can lie. By
            default the indices of the cotangent.
        groups: Splits the operand's first dimension into ``(groups, rest)`` for the equation.
        scale: A number that the block is multiplied by.
        output: Which tensor of the call's results the cotangent is of.
        gradient: A faster way to the operand's gradient than the einsum, from a cotangent without
            the leading dimension and the saved tensors, in the dimensions of the equation. Like
            ``prepare``, it must not hold tensors.

    Returns:
        The recipe.

    Raises:
        RuleError: The equation uses a reserved index, or one that no factor has.
    """
    form = _form(equation, dims)
    if prepare or groups or gradient or scale != 1:
        form = Product(equation, form.dims, prepare, groups, scale, gradient)
    return Recipe(operand, form, saved, output)


@lru_cache(maxsize=4096)
def _form(equation: str, dims: str | None) -> Product:
    """The form of a product of its factors, of an equation that is valid for a rule."""
    inputs, output = equation.split("->")
    if set("kb") & set(equation) or not set(output) - {"1"} <= set(inputs):
        raise RuleError(
            f"The equation `{equation}` of a rule is not valid: the indices `k` and `b` belong to "
            "the objectives and the samples, and every index of the operand must be in a factor. "
            "Pass other letters."
        )
    return Product(equation, dims or inputs.split(",")[0])


class Product(NamedTuple):
    """The form of :func:`product`."""

    equation: str
    dims: str
    prepare: Prepare | None = None
    groups: int | None = None
    scale: float = 1
    gradient: Callable[..., Tensor] | None = None

    def block(self, layout: Layout | None, cotangent: Tensor, *saved: Tensor) -> Block:
        """The block, as factors."""
        scaled = cotangent if self.scale == 1 else cotangent * self.scale
        factors = (scaled, *saved) if self.prepare is None else self.prepare(scaled, *saved)
        block = assemble(self.equation, self.dims, layout, *factors)
        if self.gradient is None:
            return block
        if layout is not None and (layout.has_before or layout.has_after):
            return block
        dim = None if layout is None else layout.dim
        return replace(block, adjoint=Adjoint(self.gradient, dim, scaled, saved, block.parameter))

    def region(self, region: Region) -> Region:
        """The operand's region, with its first dimension split into groups."""
        return region if self.groups is None else region.split_first(self.groups)


def lookup(operand: Tensor, indices: Tensor, padding: int | None = None) -> Recipe:
    """The recipe of reading rows of a table: ``output[*t, :] = operand[indices[*t], :]``.

    Args:
        operand: The table, of shape ``(rows, *d)``.
        indices: The rows that are read, of any shape. Negative ones count from the end.
        padding: A row whose reads have no gradient.
    """
    positions = POSITIONS[: indices.dim()]
    return Recipe(operand, Reading(positions, operand.shape[0], padding), (indices,))


@dataclass(frozen=True)
class Reading:
    """The form of :func:`lookup`."""

    dims: str
    size: int
    padding: int | None

    def block(self, layout: Layout | None, cotangent: Tensor, *saved: Tensor) -> Lookup:
        """The block, as the places that were read and their cotangents."""
        (indices,) = saved
        indices = torch.where(indices < 0, indices + self.size, indices)
        if self.padding is not None:
            kept = (indices != self.padding).view(indices.shape + (1,) * self._columns(cotangent))
            cotangent = torch.where(kept, cotangent, 0)
        cotangent = (
            cotangent.flatten(1 + indices.dim())
            if self._columns(cotangent)
            else (cotangent.unsqueeze(-1))
        )
        if layout is None:
            flat = cotangent.reshape(cotangent.shape[0], 1, -1, cotangent.shape[-1])
            return Lookup(indices.reshape(1, -1), flat)
        first = layout.dim + layout.has_before
        places = layout.split(indices, layout.dim).movedim(first, 0)
        moved = layout.split(cotangent, layout.dim + 1).movedim(first + 1, 1)
        k, b, columns = moved.shape[0], moved.shape[1], moved.shape[-1]
        return Lookup(places.reshape(b, -1), moved.reshape(k, b, -1, columns))

    def region(self, region: Region) -> Region:
        """The whole table."""
        return region

    def _columns(self, cotangent: Tensor) -> int:
        """The number of dimensions of one row of the table."""
        return cotangent.dim() - 1 - len(self.dims)


def positions(count: int) -> str:
    """Letters for ``count`` dimensions that are summed over."""
    return POSITIONS[:count]


def multilinear(output: str, *terms: tuple[Tensor, str], scale: float = 1) -> list[Recipe] | None:
    """Recipes of an einsum: the block of a term is an einsum of the cotangent and the others.

    Args:
        output: The indices of the output's dimensions.
        terms: Each tensor with the indices of its dimensions. A dimension of size one is
            broadcast where its index is larger elsewhere.
        scale: A number that the einsum is multiplied by.

    Returns:
        Recipes for the terms that require a gradient, or ``None`` where an index repeats within a
        term or stands in that term alone: such a product is left to the fallback.
    """
    sizes = {label: 1 for _, labels in terms for label in labels}
    for tensor, labels in terms:
        for label, n in zip(labels, tensor.shape, strict=True):
            sizes[label] = n if n > 1 else sizes[label]
    squeezed = [_squeeze(tensor, labels, sizes) for tensor, labels in terms]
    recipes = []
    for i, (operand, labels) in enumerate(terms):
        if not operand.requires_grad:
            continue
        others = squeezed[:i] + squeezed[i + 1 :]
        known = set(output).union(*(of for _, of in others))
        target = "".join(
            label if n == sizes[label] else "1"
            for label, n in zip(labels, operand.shape, strict=True)
        )
        if len(set(labels)) < len(labels) or not set(target) - {"1"} <= known:
            return None
        equation = ",".join((output, *(of for _, of in others))) + "->" + target
        recipes.append(product(operand, equation, *(x for x, _ in others), scale=scale))
    return recipes


def _squeeze(tensor: Tensor, labels: str, sizes: dict[str, int]) -> tuple[Tensor, str]:
    """A term without the dimensions along which it is broadcast."""
    repeated = [d for d, label in enumerate(labels) if tensor.shape[d] != sizes[label]]
    kept = "".join(label for d, label in enumerate(labels) if d not in repeated)
    return (tensor.squeeze(repeated) if repeated else tensor), kept


def addend(
    operand: Tensor,
    output: str,
    shape: Sequence[int],
    *saved: Tensor,
    scale: float = 1,
    prepare: Prepare | None = None,
) -> Recipe:
    """The recipe of a tensor that is broadcast to ``shape`` and added, times ``scale``.

    For an elementwise function of it, ``prepare`` multiplies the cotangent by the derivative.
    """
    skipped = len(shape) - operand.dim()
    pairs = zip(output[skipped:], operand.shape, shape[skipped:], strict=True)
    target = "".join(label if n == size else "1" for label, n, size in pairs)
    return product(operand, f"{output}->{target}", *saved, prepare=prepare, scale=scale)


def broadcast(*shapes: Sequence[int]) -> tuple[str, list[str]]:
    """Indices for tensors that are broadcast against each other, and for their result."""
    output = positions(max(len(shape) for shape in shapes))
    return output, [output[len(output) - len(shape) :] for shape in shapes]
