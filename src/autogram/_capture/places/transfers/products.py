"""Places behind matrix products, attention, and functions of matrices."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from autogram._capture.places.places import EMPTY, Places, plain, unanimous
from autogram._capture.places.transfers.step import (
    NodeStep,
    Transfer,
    all_together,
    by_element,
    by_input,
    inserted,
    leading,
    only,
    table,
)

# The most places at which a vote looks.
_LARGEST_VOTE = 2**24


def _contracted(dim: int, factor: str = "") -> Transfer:
    """Sums over all positions along a dimension, counted from the last one.

    Where zeros of the other factor may keep samples apart, only positions without zeros vote.
    """

    def transfer(step: NodeStep, places: Places) -> Places:
        axis = len(step.result) + dim
        other = None
        if step.is_voting and factor:
            other = (step.saved if places.varies(axis) else step.constant)(factor)
        if other is not None and other.layout == torch.strided:
            # Of y = A B: dB[j, k] = sum_i A[i, j] g[i, k], and dA[i, j] = sum_k g[i, k] B[j, k].
            samples = places.grid()
            if dim == -2:
                voted = _voted(samples, other.mT != 0)
            else:
                voted = _voted(samples.mT, other != 0)
                voted = None if voted is None else voted.mT
            if voted is not None:
                return Places(plain(step.given), voted, True)
        size = step.given[len(step.given) + dim]
        return places.without(axis).inserted(axis, size).summed(step.given)

    return transfer


def _voted(samples: Tensor, is_factor: Tensor) -> Tensor | None:
    """The sample of all positions with a factor: ``(*, c, b)`` and ``(*, a, c)`` to ``(*, a, b)``.

    ``None`` if that would look at too many places.
    """
    for axis in range(is_factor.dim() - 2):
        if samples.shape[axis] == 1:  # the sample is the same for all
            is_factor = is_factor.any(axis, keepdim=True)
    shape = torch.broadcast_shapes(samples.shape[:-2], is_factor.shape[:-2])
    if shape.numel() * is_factor.shape[-2:].numel() * samples.shape[-1] > _LARGEST_VOTE:
        return None
    votes = torch.where(is_factor.unsqueeze(-1), samples.unsqueeze(-3), EMPTY)
    return unanimous(votes, [votes.dim() - 2]).squeeze(-2)


def _attended(step: NodeStep, places: Places) -> Places:
    """Queries depend on their own positions, keys and values on all queries that may see them.

    A mask's gradient depends on the queries, too.
    """
    rank, given = len(step.result), step.given
    places = places.merged([rank - 1])
    if step.position > 2:
        return places.resized(rank - 1, given[-1]).summed(given)
    if len(given) != rank:
        return all_together(step, places)
    if step.position > 0 and step.is_voting and places.varies(rank - 2):
        name = next((x for x in ("attn_mask", "attn_bias") if step.has(x)), None)
        mask = None if name is None else step.saved(name)
        if mask is not None and mask.shape[-1] == given[-2]:
            is_open = mask if mask.dtype == torch.bool else mask != -torch.inf
            is_open = is_open[(None,) * (rank - is_open.dim())]
            is_open = is_open.expand(*is_open.shape[:-2], step.result[-2], -1)
            voted = _voted(places.grid(), is_open.mT)
            if voted is not None:
                shape = (*step.result[:-2], *given[-2:])
                return Places(plain(shape), voted, True).fitted(given)
    return (places if step.position == 0 else places.merged([rank - 2])).fitted(given)


def _bilinear(step: NodeStep, places: Places) -> Places:
    """A product of three tensors, which may all share their first dimension."""
    is_expanded = 0 in step.argument(f"expand{step.position + 1}")
    is_summed = 0 in step.argument("sumdim")
    return (all_together if is_expanded or is_summed else only(0, 0))(step, places)


def _stacked(step: NodeStep, places: Places) -> Places:
    """Functions of a stack of matrices, which keep the dimensions before the matrices."""
    rank, result, given = len(step.given) - 2, step.result, step.given
    if rank < 1 or not rank <= len(result) <= rank + 2 or result[:rank] != given[:rank]:
        return all_together(step, places)
    for dim in reversed(range(rank, len(result))):
        places = places.without(dim)
    return places.inserted(rank, given[rank]).inserted(rank + 1, given[rank + 1])


def _solved(step: NodeStep, places: Places) -> Places:
    """Columns of the right side of linear equations; each has a separate solution."""
    is_left = not step.has("left") or step.argument("left")
    (matrices, number), _ = step.node.next_functions
    if step.position == 0 or not is_left or matrices is None or step.result != step.given:
        return _stacked(step, places)
    # A right side that is a stack of vectors has one dimension less than the matrices.
    sizes = tuple(matrices._input_metadata[number].shape)
    return places.merged([len(step.given) - (1 if step.result == sizes[:-1] else 2)])


def _rows(step: NodeStep, places: Places) -> Places:
    """Rows of a matrix; each is multiplied by one of several matrices."""
    is_matrix = len(step.result) == len(step.given) == 2
    return (leading(1) if is_matrix else all_together)(step, places)


def _distant(step: NodeStep, places: Places) -> Places:
    """Distances between rows."""
    rank = len(step.result)
    places = places.without(rank - 1 if step.position == 0 else rank - 2)
    return places.inserted(rank - 1, step.given[-1]).summed(step.given)


OF_PRODUCTS = table(
    (by_input(_contracted(-1, "mat2"), _contracted(-2, "self")), "Mm Bmm"),
    (by_input(by_element, _contracted(-1, "mat2"), _contracted(-2, "mat1")), "Addmm"),
    (by_input(by_element, _contracted(-1, "batch2"), _contracted(-2, "batch1")), "Baddbmm"),
    (by_input(inserted(1)), "Mv"),
    (by_input(by_element, inserted(1)), "Addmv"),
    (by_input(by_element, only(0, 0), only(1, 0)), "Addr"),
    (by_input(_rows), "GroupedMm"),
    (by_input(_contracted(-1)), "Linear MkldnnLinear"),
    (_bilinear, "Trilinear"),
    (_solved, "LinalgSolveEx"),
    (_distant, "Cdist EuclideanDist"),
)

FAMILIES_OF_PRODUCTS = (
    (re.compile(r"ScaledDotProduct.*"), _attended),
    (re.compile(r"Linalg.*|TriangularSolve|Cholesky.*|MatrixExp"), _stacked),
)
