"""Recipes: what a rule returns for the tensors that a call reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from autogram._blocks import Block, Layout, Lookup, block_of_equation
from autogram.errors import RuleError
from autogram.rules._complex import in_real_numbers

POSITIONS = "TSRUVWXYZABCDEFGHIJKLMNOPQ"

_NUMBERS = {int, float, type(None)}

Prepare = Callable[..., tuple[Tensor, ...]]


class Formula(NamedTuple):
    """How to make blocks from the cotangent of a call's result and from saved tensors.

    Attributes:
        dims: A letter for each dimension of the result: an index where the dimension may hold the
            samples, ``-`` where it cannot.
        blocks: A function of a layout (``None`` for one sample), the cotangent ``(k, *result)`` and
            the saved tensors, which returns the block of each operand. It must not hold tensors.
        groups: Number of groups into which blocks split the first dimension of an operand:
            ``(groups, rest)``. ``None`` where blocks have the dimensions of the operand.
        depth: How many leading dimensions of the result may hold the samples together. Places are
            then positions along all of them. It has no meaning where the first dimension has no
            index.
    """

    dims: str
    blocks: Callable[..., Iterable[Block | Lookup]]
    groups: int | None = None
    depth: int = 1


class Recipe(NamedTuple):
    """The blocks of one tensor that a call reads, or of several that are computed together.

    Attributes:
        operands: The tensors, as they were passed to the call. Of several, some may be untracked.
        formula: How to make the blocks of the operands.
        saved: The tensors to keep until the backward pass: exactly those that the formula needs.
        output: Index of the result whose cotangent is used.
        from_result: Takes the result of the call, and gives tensors to keep instead of ``saved``:
            those that the graph keeps for the call's own backward pass, which take no more memory.
            ``None`` if it finds none. It is not called where hooks pack what the graph keeps;
            the formula must therefore also accept ``saved``.
    """

    operands: tuple[Tensor, ...]
    formula: Formula
    saved: tuple[Tensor, ...] = ()
    output: int = 0
    from_result: Callable[[Tensor], tuple[Tensor, ...] | None] | None = None


def product(
    operand: Tensor,
    equation: str,
    *saved: Tensor,
    prepare: Prepare | None = None,
    dims: str | None = None,
    groups: int | None = None,
    scale: float = 1,
    output: int = 0,
) -> Recipe:
    """The recipe of a block that is an einsum of the cotangent and saved tensors.

    Args:
        operand: The tensor that the block belongs to. If it is complex, its block has a last
            dimension of two, which the equation does not name.
        equation: Indices of the cotangent, then of each factor, then (after the arrow) of the
            operand's dimensions: ``"to,ti->oi"`` for the weight of a linear layer. An operand's
            dimension of size one may be written ``1``. The letters ``k`` and ``b`` are reserved.
        saved: Tensors to keep. If ``prepare`` is ``None``, they are the factors. Complex factors
            are conjugated.
        prepare: A function of ``(cotangent, *saved)`` that returns the cotangent and the factors.
            The first dimension of a cotangent counts the objectives. The function must not hold
            tensors, and should compute with :func:`promoted` tensors.
        dims: The index of each dimension of the call's result, or ``-`` where samples cannot be.
            By default, the indices of the cotangent.
        groups: Splits the operand's first dimension into ``(groups, rest)`` for the equation.
        scale: A number that the block is multiplied by.
        output: Index of the result whose cotangent is used.

    Returns:
        The recipe.

    Raises:
        RuleError: The equation uses a reserved index, or one that no factor has.
    """
    # A cache may keep neither a function of the user nor an object of a compiler.
    is_kept = prepare is None and are_numbers(groups, scale)
    make = formula_of if is_kept else formula_of.__wrapped__
    formula = make(equation, dims, prepare, groups, scale, operand.is_complex())
    return Recipe((operand,), formula, saved, output)


@lru_cache(maxsize=4096)
def formula_of(
    equation: str,
    dims: str | None = None,
    prepare: Prepare | None = None,
    groups: int | None = None,
    scale: complex = 1,
    is_complex: bool = False,
) -> Formula:
    """The formula of a product, as :func:`product` describes it, if the equation is valid."""
    inputs, output = equation.split("->")
    if set("kb") & set(equation) or not set(output) - {"1"} <= set(inputs):
        raise RuleError(
            f"The equation `{equation}` of a rule is not valid: the indices `k` and `b` belong to "
            "the objectives and the samples, and every index of the operand must be in a factor. "
            "Pass other letters."
        )
    dims = dims or inputs.split(",")[0]
    blocks = partial(_einsum, equation, dims, prepare, scale, is_complex)
    return Formula(dims, blocks, groups, _depth(dims, inputs.split(","), output))


def _depth(dims: str, inputs: Sequence[str], output: str) -> int:
    """Number of leading dimensions of a result that are adjacent positions in all factors."""
    depth = 1
    while depth < len(dims) and not set(dims[: depth + 1]) & {"-", *output}:
        labels = dims[: depth + 1]
        if any(labels not in of and set(labels) & set(of) for of in inputs):
            break
        depth += 1
    return depth


def are_numbers(*values: float | None) -> bool:
    """Whether some values are numbers, and not sizes that a compiler leaves open.

    Such a size equals a number, so that a cache would return its entry for the number.
    """
    return _NUMBERS.issuperset(map(type, values))


def _einsum(
    equation: str,
    dims: str,
    prepare: Prepare | None,
    scale: complex,
    is_complex: bool,
    layout: Layout | None,
    cotangent: Tensor,
    *saved: Tensor,
) -> tuple[Block]:
    """The block of an einsum of the cotangent and the saved tensors, or of prepared factors."""
    if scale != 1:
        cotangent = promoted(cotangent)[0] * scale.conjugate()
    factors = (cotangent, *saved) if prepare is None else prepare(cotangent, *saved)
    if cotangent.is_complex():
        equation, factors = in_real_numbers(equation, *factors, is_complex=is_complex)
    return (block_of_equation(equation, dims, layout, *factors),)


def promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Floating-point tensors in one dtype, of at least 32 bits; other tensors as they are.

    The cotangent and saved tensors may be in half precision. Products of factors accumulate in at
    least float32, but a factor computed in half precision has already lost digits.
    """
    floating = [x.dtype for x in tensors if x.is_floating_point()]
    dtype = reduce(torch.promote_types, floating, torch.float32)
    return tuple([x.to(dtype) if x.is_floating_point() else x for x in tensors])


def lookup(operand: Tensor, indices: Tensor, padding: int | None = None) -> Recipe:
    """The recipe of reading rows of a table: ``output[*t, :] = operand[indices[*t], :]``.

    Args:
        operand: The table, of shape ``(rows, *d)``.
        indices: The rows that are read, of any shape. Negative ones count from the end.
        padding: The index of a row whose reads have no gradient.
    """
    read = partial(read_rows, operand.shape[0], padding)
    formula = Formula(positions(indices.dim()), read, depth=indices.dim())
    return Recipe((operand,), formula, (indices,))


def read_rows(
    size: int, padding: int | None, layout: Layout | None, cotangent: Tensor, indices: Tensor
) -> tuple[Lookup]:
    """The block of a table: the rows read, and their cotangents ``(k, *indices, *d)``."""
    indices = torch.where(indices < 0, indices + size, indices)
    is_vector = cotangent.dim() == 1 + indices.dim()
    cotangent = cotangent.unsqueeze(-1) if is_vector else cotangent.flatten(1 + indices.dim())
    if padding is not None:
        cotangent = torch.where((indices != padding).unsqueeze(-1), cotangent, 0)
    if layout is None:
        rows, given = indices.unsqueeze(0), cotangent.unsqueeze(1)
    else:
        first = layout.dim + layout.has_before
        rows = layout.split(indices, layout.dim).movedim(first, 0)
        given = layout.split(cotangent, layout.dim + 1).movedim(first + 1, 1)
    k, samples, columns = given.shape[0], given.shape[1], given.shape[-1]
    return (Lookup(rows.reshape(samples, -1), given.reshape(k, samples, -1, columns)),)


def positions(count: int) -> str:
    """Letters for ``count`` dimensions that are summed over."""
    return POSITIONS[:count]


def multilinear(output: str, *terms: tuple[Tensor, str], scale: float = 1) -> list[Recipe] | None:
    """Recipes of an einsum: each term's block is an einsum of the cotangent and the other terms.

    Args:
        output: The indices of the output's dimensions.
        terms: Each tensor with the indices of its dimensions. A dimension of size one is
            broadcast where its index is larger elsewhere.
        scale: A number that the einsum is multiplied by.

    Returns:
        Recipes for the terms that require a gradient. ``None`` where an index repeats within a
        term, or is summed over and occurs in that term alone; the rows of such a call are left to
        the fallback.
    """
    labels, are_one = (
        tuple([of for _, of in terms]),
        tuple([dims_of_one(x.shape) for x, _ in terms]),
    )
    equations, repeated = _equations(output, labels, are_one)
    pairs = zip(terms, repeated, strict=True)
    factors = [x.squeeze(dims) if dims else x for (x, _), dims in pairs]
    recipes = []
    for i, ((operand, _), equation) in enumerate(zip(terms, equations, strict=True)):
        if operand.requires_grad:
            if equation is None:
                return None
            others = factors[:i] + factors[i + 1 :]
            recipes.append(product(operand, equation, *others, scale=scale))
    return recipes


@lru_cache(maxsize=4096)
def _equations(
    output: str, labels: tuple[str, ...], are_one: tuple[tuple[bool, ...], ...]
) -> tuple[list[str | None], list[tuple[int, ...]]]:
    """The equation of each term's block, and the dimensions along which each term is broadcast.

    An equation is ``None`` if no product can have it.
    """
    targets = _targets(output, labels, are_one)
    inputs = [target.replace("1", "") for target in targets]
    equations: list[str | None] = []
    for i, target in enumerate(targets):
        given = ",".join((output, *inputs[:i], *inputs[i + 1 :]))
        fits = len(set(labels[i])) == len(labels[i]) and set(target) - {"1"} <= set(given)
        equations.append(f"{given}->{target}" if fits else None)
    repeated = [tuple(d for d, x in enumerate(target) if x == "1") for target in targets]
    return equations, repeated


def _targets(output: str, labels: Sequence[str], are_one: Sequence[Sequence[bool]]) -> list[str]:
    """The indices of each term, with ``1`` where it is broadcast, or adds up a single element."""
    terms = [list(zip(of, ones, strict=True)) for of, ones in zip(labels, are_one, strict=True)]
    larger = {x for term in terms for x, is_one in term if not is_one}
    counts = Counter(x for of in labels for x in set(of))
    left_out = larger | {x for x, count in counts.items() if count == 1 and x not in output}
    return ["".join(["1" if one and x in left_out else x for x, one in term]) for term in terms]


def dims_of_one(shape: Sequence[int]) -> tuple[bool, ...]:
    """Which dimensions have size one; this alone decides what is broadcast."""
    if 1 not in shape:
        return (False,) * len(shape)
    return tuple([bool(n == 1) for n in shape])  # sizes that a compiler leaves open have no hash


def addend(
    operand: Tensor,
    *others: Sequence[int],
    saved: tuple[Tensor, ...] = (),
    scale: float = 1,
    prepare: Prepare | None = None,
) -> Recipe:
    """The recipe of a tensor that is added, times ``scale``, to tensors of some other shapes.

    For an elementwise function of this tensor, ``prepare`` multiplies the cotangent by its
    derivative.
    """
    equation = sum_equation(dims_of_one(operand.shape), tuple(map(dims_of_one, others)))
    return product(operand, equation, *saved, prepare=prepare, scale=scale)


@lru_cache(maxsize=4096)
def sum_equation(own: tuple[bool, ...], others: tuple[tuple[bool, ...], ...]) -> str:
    """The equation of a tensor that is added to others, from which of their sizes are one."""
    output, labels = broadcast(len(own), *map(len, others))
    return f"{output}->{_targets(output, labels, (own, *others))[0]}"


@lru_cache
def broadcast(*counts: int) -> tuple[str, list[str]]:
    """Indices of the result and of tensors that are broadcast, by their numbers of dimensions."""
    output = positions(max(counts))
    return output, [output[len(output) - count :] for count in counts]
