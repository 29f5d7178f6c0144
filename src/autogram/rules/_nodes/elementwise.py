"""Nodes of broadcast arithmetic: the cotangent times a derivative, summed to the input's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Layout
from autogram.rules._nodes.registry import NodeInput, NodeRecipe, addend_at, of_nodes
from autogram.rules._recipe import (
    Formula,
    Prepare,
    dims_of_one,
    formula_of,
    positions,
    promoted,
    sum_equation,
)
from autogram.rules.elementwise import by_denominator, by_numerator, negative_part


@of_nodes("Add", "Sub", holds_for_complex=True)
def _add(read: NodeInput) -> NodeRecipe:
    """``self + alpha * other``, or minus it."""
    if read.position == 0:
        return addend_at(read)
    alpha = read.number("alpha")
    return addend_at(read, -alpha if read.operation == "Sub" else alpha)


@of_nodes("Rsub", holds_for_complex=True)
def _rsub(read: NodeInput) -> NodeRecipe:
    """``other - alpha * self``."""
    return addend_at(read, 1 if read.position else -read.number("alpha"))


@of_nodes("Expand", holds_for_complex=True)
def _expand(read: NodeInput) -> NodeRecipe:
    """Copies along some dimensions."""
    return addend_at(read)


@of_nodes("CopyBackwards")
def _copy(read: NodeInput) -> NodeRecipe | None:
    """The source of an in-place copy. The result keeps nothing of the old values."""
    return addend_at(read) if read.position == 1 else None


@of_nodes("Mul", holds_for_complex=True)
def _mul(read: NodeInput) -> NodeRecipe:
    """``self * other``, where other may be a number."""
    field = "self" if read.position else "other"
    if not read.has_tensor(field):
        return addend_at(read, read.number(field))
    return _multiplied(read, field)


@of_nodes("Div", holds_for_complex=True)
def _div(read: NodeInput) -> NodeRecipe | None:
    """``self / other``, not rounded, where other may be a number."""
    if read.has("rounding_mode") and read.number("rounding_mode") is not None:
        return None
    if not read.has_tensor("other"):
        number = read.number("other")
        return addend_at(read, 1 / number) if number else None
    if read.position:
        return addend_at(read, prepare=by_denominator, fields=("self", "other"))
    return addend_at(read, prepare=by_numerator, fields=("other",))


@of_nodes("Addcmul", holds_for_complex=True)
def _addcmul(read: NodeInput) -> NodeRecipe:
    """``self + value * tensor1 * tensor2``."""
    if read.position == 0:
        return addend_at(read)
    return _multiplied(read, f"tensor{3 - read.position}", read.number("value"))


@of_nodes("Addcdiv", holds_for_complex=True)
def _addcdiv(read: NodeInput) -> NodeRecipe:
    """``self + value * tensor1 / tensor2``."""
    if read.position == 0:
        return addend_at(read)
    value = read.number("value")
    if read.position == 1:
        return addend_at(read, value, by_numerator, ("tensor2",))
    return addend_at(read, value, by_denominator, ("tensor1", "tensor2"))


@of_nodes("Lerp", holds_for_complex=True)
def _lerp(read: NodeInput) -> NodeRecipe:
    """``self + weight * (end - self)``, where the weight may be a number."""
    if not read.has_tensor("weight"):
        weight = read.number("weight")
        return addend_at(read, weight if read.position else 1 - weight)
    if read.position == 2:
        return addend_at(read, prepare=_by_distance, fields=("self", "end"))
    if read.position == 1:
        return _multiplied(read, "weight")
    return addend_at(read, prepare=_by_rest, fields=("weight",))


@of_nodes("Where", holds_for_complex=True)
def _where(read: NodeInput) -> NodeRecipe:
    """One of two tensors, selected by a condition."""
    prepare = _outside if read.position else _inside
    return addend_at(read, prepare=prepare, fields=("condition",))


@of_nodes("MaskedFill", holds_for_complex=True)
def _masked_fill(read: NodeInput) -> NodeRecipe:
    """A tensor outside of a mask, and a value within."""
    return addend_at(read, prepare=_inside if read.position else _outside, fields=("mask",))


@of_nodes("PreluKernel")
def _prelu(read: NodeInput) -> NodeRecipe:
    """The input, or below zero its product with the slope."""
    if read.position:
        return addend_at(read, prepare=_by_negative_part, fields=("self",))
    return addend_at(read, prepare=_by_slope, fields=("self", "weight"))


@of_nodes("Pow", holds_for_complex=True)
def _pow(read: NodeInput) -> NodeRecipe | None:
    """``self ** exponent``, where either may be a number."""
    if not read.has_tensor("exponent"):
        return addend_at(read, prepare=_power(read.number("exponent")), fields=("self",))
    if not read.has_tensor("self"):
        return addend_at(read, prepare=_exponential(read.number("self")), fields=("exponent",))
    prepare = _by_exponent if read.position else _by_base
    return addend_at(read, prepare=prepare, fields=("self", "exponent"))


@of_nodes("Maximum", "Minimum")
def _extremum(read: NodeInput) -> NodeRecipe:
    """The larger or the smaller of two; where they are equal, each has half of the gradient."""
    fields = ("other", "self") if read.position else ("self", "other")
    prepare = _where_largest if read.operation == "Maximum" else _where_smallest
    return addend_at(read, prepare=prepare, fields=fields)


@of_nodes("Repeat", holds_for_complex=True)
def _repeat(read: NodeInput) -> NodeRecipe:
    """Copies side by side: a matrix maps places of the result to the places they copy."""
    return NodeRecipe(_formula_of_copies(read.shape, read.result, read.is_complex))


def _multiplied(read: NodeInput, field: str, scale: complex = 1) -> NodeRecipe:
    """The recipe of an input that is multiplied by a tensor, and by a number."""
    equation = sum_equation(dims_of_one(read.shape), (dims_of_one(read.result),))
    return NodeRecipe(_formula_of_factor(equation, scale, read.is_complex), (field,))


@lru_cache(maxsize=4096)
def _formula_of_factor(equation: str, scale: complex, is_complex: bool) -> Formula:
    """The formula of an input with a factor that keeps its own sizes."""
    formula = formula_of(equation, None, None, None, scale, is_complex)
    blocks = partial(_by_factor, equation, scale, is_complex)
    return formula._replace(blocks=blocks)


def _by_factor(
    equation: str,
    scale: complex,
    is_complex: bool,
    layout: Layout | None,
    cotangent: Tensor,
    factor: Tensor,
) -> Any:
    """The block of an input, from a factor that is broadcast to the result.

    It leaves out the dimensions along which the factor is broadcast. A number has any dtype.
    """
    output, target = equation.split("->")
    if factor.dim() == 0 or not (factor.is_floating_point() or factor.is_complex()):
        wide = torch.promote_types(cotangent.dtype, torch.float32)
        factor = factor.to(wide.to_complex() if factor.is_complex() else wide.to_real())
    samples = "" if layout is None else output[layout.dim : layout.dim + layout.depth]
    shape, missing = cotangent.shape[1:], len(output) - factor.dim()
    labels, sizes = output[missing:], shape[missing:]
    broad = [d for d, n in enumerate(factor.shape) if n == 1 != sizes[d]]
    left = "".join([label for d, label in enumerate(labels) if d not in broad])
    if samples not in left and set(samples) & set(left):
        left, factor = output, factor.expand(shape)  # samples need all of their dimensions
    elif broad:
        factor = factor.squeeze(broad)
    formula = formula_of(f"{output},{left}->{target}", None, None, None, scale, is_complex)
    return formula.blocks(layout, cotangent, factor)


@lru_cache(maxsize=4096)
def _formula_of_copies(
    shape: tuple[int, ...], result: tuple[int, ...], is_complex: bool
) -> Formula:
    """The formula of a tensor whose copies are side by side, with a matrix for each dimension."""
    labels, rank = positions(len(result) + len(shape)), len(result)
    output, missing, target = labels[:rank], rank - len(shape), ""
    terms, sizes = [output], []
    for dim, (label, count) in enumerate(zip(output[missing:], result[missing:], strict=True)):
        if shape[dim] in (1, count):
            target += label if shape[dim] == count else "1"
        else:
            target += labels[rank + dim]
            terms.append(label + labels[rank + dim])
            sizes.append((count, shape[dim]))
    prepare = partial(_with_copies, tuple(sizes)) if sizes else None
    return formula_of(f"{','.join(terms)}->{target}", output, prepare, None, 1, is_complex)


def _with_copies(sizes: Sequence[tuple[int, int]], cotangent: Tensor) -> tuple[Tensor, ...]:
    """The cotangent, and for some dimensions a matrix that tells which place copies which."""
    eye = partial(torch.eye, dtype=cotangent.dtype.to_real(), device=cotangent.device)
    return cotangent, *[eye(size).repeat(count // size, 1) for count, size in sizes]


@lru_cache(maxsize=4096)
def _power(exponent: complex) -> Prepare:
    return partial(_by_power, exponent)


def _by_power(exponent: complex, *tensors: Tensor) -> tuple[Tensor]:
    """The cotangent of ``x ** exponent`` times its derivative by ``x``."""
    cotangent, base = promoted(*tensors)
    if exponent == 0:
        return (torch.zeros_like(cotangent),)
    return (cotangent * (exponent * base.pow(exponent - 1)).conj(),)


def _by_base(*tensors: Tensor) -> tuple[Tensor]:
    """The same for an exponent that is a tensor."""
    cotangent, base, exponent = promoted(*tensors)
    derivative = exponent * base.pow(exponent - 1)
    return (torch.where(exponent == 0, 0, cotangent * derivative.conj()),)


@lru_cache(maxsize=4096)
def _exponential(base: complex) -> Prepare:
    return partial(_by_exponent_of, base)


def _by_exponent_of(base: complex, *tensors: Tensor) -> tuple[Tensor]:
    """The cotangent of ``base ** x`` times its derivative by ``x``."""
    cotangent, exponent = promoted(*tensors)
    return _by_exponent(cotangent, torch.as_tensor(base, device=exponent.device), exponent)


def _by_exponent(*tensors: Tensor) -> tuple[Tensor]:
    """The cotangent of ``base ** x`` times its derivative by ``x``."""
    cotangent, base, exponent = promoted(*tensors)
    derivative = base.pow(exponent) * base.log()
    is_constant = (base == 0) & (exponent.real >= 0)
    return (torch.where(is_constant, 0, cotangent * derivative.conj()),)


def _by_distance(*tensors: Tensor) -> tuple[Tensor]:
    """The cotangent times the distance from one tensor to another."""
    cotangent, start, end = promoted(*tensors)
    return (cotangent * (end - start).conj(),)


def _by_rest(*tensors: Tensor) -> tuple[Tensor]:
    """The cotangent times one minus the weight."""
    cotangent, weight = promoted(*tensors)
    return (cotangent * (1 - weight).conj(),)


# Select below, do not multiply: masked-out values may be infinite.


def _inside(cotangent: Tensor, mask: Tensor) -> tuple[Tensor]:
    return (torch.where(mask, cotangent, 0),)


def _outside(cotangent: Tensor, mask: Tensor) -> tuple[Tensor]:
    return (torch.where(mask, 0, cotangent),)


def _where_largest(cotangent: Tensor, input: Tensor, other: Tensor) -> tuple[Tensor]:
    return _shared(cotangent, input == other, input < other)


def _where_smallest(cotangent: Tensor, input: Tensor, other: Tensor) -> tuple[Tensor]:
    return _shared(cotangent, input == other, input > other)


def _shared(cotangent: Tensor, is_equal: Tensor, is_left: Tensor) -> tuple[Tensor]:
    """The cotangent, half of it where numbers are equal, and zero where the other one won."""
    return (torch.where(is_left, 0, torch.where(is_equal, cotangent / 2, cotangent)),)


def _by_slope(cotangent: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor]:
    cotangent, input, weight = promoted(cotangent, input, weight)
    return (torch.where(input > 0, cotangent, cotangent * weight),)


def _by_negative_part(*tensors: Tensor) -> tuple[Tensor]:
    cotangent, part = negative_part(*promoted(*tensors))
    return (cotangent * part,)
