"""Rules of matrix products.

y[t, o] = sum_i x[t, i] W[o, i] + c[o]; with g the cotangent of y, the rows of a sample are

    dW[o, i] = sum_t g[t, o] x[t, i]        dc[o] = sum_t g[t, o]

with t over the positions of that sample. Every other product here is the same sum with its own
indices (Goodfellow 2015, arXiv:1510.01799, for one position; Li et al. 2021, arXiv:2110.05679, for
several).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from opt_einsum.parser import parse_einsum_input
from torch import Tensor
from torch.nn import functional as F

from autogram._blocks import Block, Layout, Routed
from autogram.rules._recipe import (
    POSITIONS,
    Formula,
    Recipe,
    addend,
    are_numbers,
    broadcast,
    formula_of,
    multilinear,
    positions,
    product,
)
from autogram.rules._registry import register_rule, variants

_USABLE = "acdefghijlmnopqrstuvwxyzACDEFGHIJ"


@register_rule(F.linear, holds_for_complex=True)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Recipe] | None:
    """Weight and bias of ``F.linear``."""
    if weight.dim() != 2:
        return None
    t, is_complex = POSITIONS[: input.dim() - 1], weight.is_complex()
    of_weight = formula_of(f"{t}o,{t}i->oi", is_complex=is_complex)
    recipes = [Recipe((weight,), of_weight, (input,))]
    if bias is not None:
        recipes.append(Recipe((bias,), formula_of(f"{t}o->o", is_complex=is_complex)))
    return recipes


@register_rule(torch.bilinear, holds_for_complex=True)
def bilinear(
    input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Recipe]:
    """Weight and bias: dW[o, i, j] = sum_t g[t, o] x1[t, i] x2[t, j]."""
    t = positions(input1.dim() - 1)
    of_weight = product(weight, f"{t}o,{t}i,{t}j->oij", input1, input2)
    return [of_weight] if bias is None else [of_weight, product(bias, f"{t}o->o")]


@register_rule(*variants("matmul", "mm", "bmm", "mv"), holds_for_complex=True)
def matmul(input: Tensor, other: Tensor, *, scale: float = 1) -> list[Recipe] | None:
    """Both sides of a matrix product, times a number, with broadcast batches."""
    dims = input.dim(), other.dim()
    if dims == (2, 2) and are_numbers(scale):  # nothing is broadcast
        options = {"scale": scale, "is_complex": input.is_complex()}
        of_input, of_other = formula_of("op,ip->oi", **options), formula_of("op,oi->ip", **options)
        return [Recipe((input,), of_input, (other,)), Recipe((other,), of_other, (input,))]
    output, *labels = _matmul_labels(*dims)
    return multilinear(output, *zip((input, other), labels, strict=True), scale=scale)


@register_rule(torch.Tensor.__rmatmul__, holds_for_complex=True)
def rmatmul(input: Tensor, other: Tensor) -> list[Recipe] | None:
    """``other @ input``."""
    return matmul(other, input)


@register_rule(
    *variants("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "addmv_"), holds_for_complex=True
)
def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> list[Recipe] | None:
    """``beta * input + alpha * mat1 @ mat2``."""
    recipes = matmul(mat1, mat2, scale=alpha)
    left, right = tuple(mat1.shape), tuple(mat2.shape)
    shape = (*left[:-1], *right[max(1, len(right) - 1) :])
    return None if recipes is None else [*recipes, addend(input, shape, scale=beta)]


@register_rule(*variants("outer", "ger"), holds_for_complex=True)
def outer(input: Tensor, vec2: Tensor) -> list[Recipe] | None:
    """Both vectors of an outer product."""
    return multilinear("op", (input, "o"), (vec2, "p"))


@register_rule(*variants("inner", "dot"), holds_for_complex=True)
def inner(input: Tensor, other: Tensor) -> list[Recipe] | None:
    """Both sides of inner products along the last dimensions."""
    if 0 in (input.dim(), other.dim()):
        return None  # a number times a tensor
    t = positions(input.dim() + other.dim() - 2)
    left, right = t[: input.dim() - 1], t[input.dim() - 1 :]
    return multilinear(t, (input, f"{left}i"), (other, f"{right}i"))


@register_rule(torch.linalg.vecdot)
def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> list[Recipe] | None:
    """Both sides of inner products along a dimension, with the others broadcast."""
    output, (left, right) = broadcast(x.dim(), y.dim())
    return multilinear(output.replace(output[dim], ""), (x, left), (y, right))


@register_rule(torch.tensordot, holds_for_complex=True)
def tensordot(
    a: Tensor, b: Tensor, dims: Any = 2, out: Tensor | None = None
) -> list[Recipe] | None:
    """Both sides of a product that is summed over some dimensions of each."""
    if out is not None:
        return None  # torch reports that there is no gradient
    if isinstance(dims, int):
        dims = range(a.dim() - dims, a.dim()), range(dims)
    elif not isinstance(dims, (list, tuple)):
        return None
    each = [(x,) if isinstance(x, int) else x for x in dims]
    pairs = [(i % a.dim(), j % b.dim()) for i, j in zip(*each, strict=True)]
    letters = positions(a.dim() + b.dim())
    left, right = list(letters[: a.dim()]), list(letters[a.dim() :])
    for i, j in pairs:
        right[j] = left[i]
    shared = set(left) & set(right)
    output = "".join([x for x in (*left, *right) if x not in shared])
    return multilinear(output, (a, "".join(left)), (b, "".join(right)))


@register_rule(*variants("_grouped_mm"))
def grouped_mm(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,  # noqa: ARG001 - the signature of the torch function
) -> list[Recipe] | None:
    """A matrix for each range of rows: dW[e, i, o] = sum of g[t, o] x[t, i] over t in range e.

    ``torch.nn.functional.grouped_mm`` calls it with several experts' weights in one tensor.
    """
    if input.dim() != 2 or mat2.dim() != 3 or offs is None or bias is not None:
        return None
    return [Recipe((mat2,), Formula("t-", blocks_of_stack), (input, offs))]


@register_rule(torch.einsum, holds_for_complex=True)
def einsum(equation: Any, *operands: Any) -> list[Recipe] | None:
    """Every operand of ``torch.einsum`` in its string form."""
    if not isinstance(equation, str):
        return None
    tensors = operands[0] if isinstance(operands[0], (list, tuple)) else operands
    parsed = _parsed(equation, tuple([tensor.dim() for tensor in tensors]))
    if parsed is None:
        return None
    output, terms = parsed
    return multilinear(output, *zip(tensors, terms, strict=True))


def blocks_of_stack(
    layout: Layout | None, cotangent: Tensor, input: Tensor, offs: Tensor
) -> tuple[Block]:
    """The block of a stack of matrices, from rows gathered by sample and matrix."""
    groups = len(offs)
    samples = 1 if layout is None else layout.batch
    rows = torch.arange(len(input), dtype=offs.dtype, device=offs.device)
    group = torch.searchsorted(offs, rows, right=True)
    owners = torch.zeros_like(group) if layout is None else layout.owners(input).view(-1)
    is_of_one = (owners >= 0) & (group < groups)
    places = torch.where(is_of_one, owners * groups + group, -1).cpu()
    gathered = Routed(0, samples * groups, places)
    of_input = gathered.split(input, 0).unflatten(0, (samples, groups))
    of_cotangent = gathered.split(cotangent, 1).unflatten(1, (samples, groups))
    return (Block("kbeto,beti->kbeio", (of_cotangent, of_input)),)


@lru_cache
def _matmul_labels(left: int, right: int) -> tuple[str, str, str]:
    """Indices of a matrix product's output and sides, from their numbers of dimensions."""
    output, (left_batch, right_batch) = broadcast(max(left - 2, 0), max(right - 2, 0))
    row = "o" if left > 1 else ""
    column = "p" if right > 1 else ""
    return output + row + column, left_batch + row + "i", right_batch + "i" + column


@lru_cache(maxsize=1024)
def _parsed(equation: str, dims: tuple[int, ...]) -> tuple[str, list[str]] | None:
    """The output and the inputs of an einsum equation, in letters that rules may use."""
    try:
        shapes = [(1,) * n for n in dims]
        inputs, output, _ = parse_einsum_input((equation, *shapes), shapes=True)
    except ValueError:
        return None  # torch reports the error
    letters = "".join(dict.fromkeys(inputs.replace(",", "")))
    if len(letters) > len(_USABLE):
        return None
    table = str.maketrans(letters, _USABLE[: len(letters)])
    return output.translate(table), inputs.translate(table).split(",")
