"""Contractions: the steps of an einsum of one or two tensors, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

ContractionKind = Literal["sum", "elementwise", "matrices", "other"]

View = tuple[tuple[int, ...], tuple[int, ...]]
"""An order of a tensor's dimensions, and the shape of the tensor in that order."""

Strided = tuple[tuple[int, ...], tuple[int, ...]] | tuple[()]
"""Sizes and strides of a view, or nothing for the unchanged tensor."""


class Contraction(NamedTuple):
    """One product of two tensors, or a sum of one, and the steps to carry it out.

    Attributes:
        kind: The way to carry it out.
        equation: The einsum.
        order: The order of the result's dimensions, if it differs.
        summed: The summed dimensions of a tensor or of an elementwise product.
        views: The views of both tensors, for a product.
        is_swapped: Whether the second tensor is the left matrix.
        unfolded: The shape of a product of matrices before its dimensions are put in order, if it
            differs.
        ranges: The dimension of the left and of the right tensor that is outermost in the memory of
            the result, if it counts products of a batch.
    """

    kind: ContractionKind
    equation: str
    order: tuple[int, ...] | None = None
    summed: tuple[int, ...] = ()
    views: tuple[View, ...] = ()
    is_swapped: bool = False
    unfolded: tuple[int, ...] | None = None
    ranges: tuple[int, ...] = ()

    @classmethod
    def of(cls, equation: str, sizes: Mapping[str, int]) -> Contraction:
        """The contraction of an equation, for indices of some sizes."""
        kind, (inputs, output) = _kind(equation, sizes), equation.split("->")
        if kind == "matrices":
            return _matrices(equation, sizes)
        if kind == "other":
            return cls(kind, equation)
        terms = inputs.split(",")
        # For a product, in the order of the larger tensor.
        by_size = sorted(terms, key=lambda labels: -prod(sizes[label] for label in labels))
        product = "".join(dict.fromkeys("".join(by_size)))
        views = [
            (
                _order(labels, "".join(label for label in product if label in labels)),
                tuple([sizes[label] if label in labels else 1 for label in product]),
            )
            for labels in terms
        ]
        summed = tuple([dim for dim, label in enumerate(product) if label not in output])
        order = _unless_in_order("".join(label for label in product if label in output), output)
        return cls(kind, equation, order, summed, tuple(views))


def _kind(equation: str, sizes: Mapping[str, int]) -> ContractionKind:
    """The way to carry out one contraction.

    If one operand has no separate index, a matrix product would have a single column. A
    product followed by a sum reads each operand once; ``torch.einsum`` would permute both.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if len(terms) == 1 and len(set(inputs)) == len(inputs):
        return "sum"
    if len(terms) == 2:
        own = [
            {x for x in labels if x not in others and sizes[x] != 1}
            for labels, others in (terms, terms[::-1])
        ]
        shared = set(terms[0]) & set(terms[1]) & set(output)
        if not all(own) and any(sizes[label] > 1 for label in shared):
            return "elementwise"
        if own[0] | own[1] <= set(output):
            return "matrices"
    return "other"


def _order(labels: str, wanted: str) -> tuple[int, ...]:
    """The permutation of ``labels`` that gives ``wanted``."""
    return tuple([labels.index(label) for label in wanted])


def _unless_in_order(labels: str, wanted: str) -> tuple[int, ...] | None:
    return None if labels == wanted else _order(labels, wanted)


def _matrices(equation: str, sizes: Mapping[str, int]) -> Contraction:
    """One matrix product of two tensors, or a batch of them.

    The rows of the product are the outer indices of the output, so that the result needs no copy.
    """
    inputs, output = equation.split("->")
    first, second = inputs.split(",")
    free = [x for x in output if (x in first) != (x in second) and sizes[x] > 1]
    is_swapped = bool(free) and free[0] in second
    if is_swapped:
        first, second = second, first
    batch = "".join(label for label in first if label in second and label in output)
    summed = "".join(label for label in first if label in second and label not in output)
    # Indices of size one may be in only one operand and not in the result.
    rows = "".join(label for label in first if label not in second)
    columns = "".join(label for label in second if label not in first)
    n, t, r, c = (prod(sizes[label] for label in of) for of in (batch, summed, rows, columns))
    stack = () if n == 1 else (n,)
    left = _order(first, batch + rows + summed), (*stack, r, t)
    right = _order(second, batch + summed + columns), (*stack, t, c)
    kept = "".join(label for label in batch + rows + columns if label in output)
    outer = next((label for label in kept if sizes[label] > 1), "-")
    if [x for x in kept if sizes[x] > 1] == [x for x in output if sizes[x] > 1]:
        kept = output  # one view puts dimensions of size one in order, too
    unfolded = tuple([sizes[label] for label in kept])
    return Contraction(
        "matrices",
        equation,
        _unless_in_order(kept, output),
        views=(left, right),
        is_swapped=is_swapped,
        unfolded=None if unfolded == (*stack, r, c) else unfolded,
        ranges=(first.index(outer), second.index(outer)) if outer in batch else (),
    )


@lru_cache(maxsize=4096)
def form_of_view(
    sizes: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]
) -> Strided | None:
    """Sizes and strides of a view in another order and shape, ``None`` if a copy is needed.

    Nothing if the tensor already has that order and shape.
    """
    tensor = torch.empty_strided(sizes, strides, device="meta")
    try:
        view = tensor.permute(order).view(shape)
    except (RuntimeError, ValueError):  # the second by a FakeTensorMode
        return None
    form = tuple(view.shape), view.stride()
    return () if form == (sizes, strides) else form


def repeats(tensor: Tensor) -> bool:
    """Whether a view reads some elements of its storage more than once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((n - 1) * stride for n, stride in pairs) + 1 < tensor.numel()
