"""Nodes of linear systems and of distances."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from autogram.rules._nodes.registry import NodeInput, NodeRecipe, of_nodes
from autogram.rules._recipe import Prepare, formula_of, positions, promoted
from autogram.rules.solving import differences, triangle_of


@of_nodes("LinalgSolveEx")
def _solve(read: NodeInput) -> NodeRecipe | None:
    """The matrix of a linear system, if it is the same for all samples."""
    left = bool(read.number("left"))
    return _of_matrix(read, left, _prepared(left), ("A", "result"))


@of_nodes("LinalgSolveTriangular")
def _solve_triangular(read: NodeInput) -> NodeRecipe | None:
    """The triangular matrix of a linear system, if it is the same for all samples."""
    left, upper, is_unit = (bool(read.number(x)) for x in ("left", "upper", "unitriangular"))
    return _of_matrix(read, left, _prepared(left, upper, is_unit), ("self", "result"), ",ij")


def _of_matrix(
    read: NodeInput, left: bool, prepare: Prepare, fields: tuple[str, ...], triangle: str = ""
) -> NodeRecipe | None:
    """The recipe of a matrix, which may have leading dimensions of size one."""
    shape, result = read.shape, read.result
    is_vector = len(result) < 2 or result == shape[:-1]
    if read.position or is_vector or any(n != 1 for n in shape[:-2]):
        return None
    t, target = positions(len(result) - 2), "1" * (len(shape) - 2) + "ij"
    cotangent, solution, dims = ("ip", "jp", "-p") if left else ("pj", "pi", "p-")
    equation = f"{t}{cotangent},{t}{solution}{triangle}->{target}"
    return NodeRecipe(formula_of(equation, t + dims, prepare), fields)


@lru_cache
def _prepared(left: bool, upper: bool | None = None, is_unit: bool = False) -> Prepare:
    return partial(_solved, left, upper, is_unit)


def _solved(left: bool, upper: bool | None, is_unit: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The negative cotangent of the other side, the solution, and the triangle if there is one."""
    cotangent, matrix, solution = promoted(*tensors)
    matrix = matrix.reshape(matrix.shape[-2:])
    if upper is None:
        return -torch.linalg.solve(matrix.mT, cotangent, left=left), solution
    options: dict[str, Any] = {"upper": not upper, "left": left, "unitriangular": is_unit}
    of_right_side = -torch.linalg.solve_triangular(matrix.mT, cotangent, **options)
    return of_right_side, solution, triangle_of(matrix, upper, is_unit)


@of_nodes("Cdist", "EuclideanDist")
def _distance(read: NodeInput) -> NodeRecipe | None:
    """Both sets of points of Euclidean distances, if they are the same for all samples."""
    if (read.has("p") and read.number("p") != 2) or any(n != 1 for n in read.shape[:-2]):
        return None
    t, target = positions(len(read.result) - 2), "1" * (len(read.shape) - 2)
    index, opposite = "rp" if read.position else "pr"
    equation = f"{t}pr,s{index}m,s{t}{opposite}m->{target}{index}m"
    prepare = _from_second if read.position else _from_first
    return NodeRecipe(formula_of(equation, None, prepare), ("x1", "x2", "result"))


def _from_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    cotangent, points, others, distances = promoted(*tensors)
    return _differences(cotangent, points, others, distances)


def _from_second(*tensors: Tensor) -> tuple[Tensor, ...]:
    cotangent, others, points, distances = promoted(*tensors)
    return _differences(cotangent, points, others, distances)


def _differences(
    cotangent: Tensor, points: Tensor, others: Tensor, distances: Tensor
) -> tuple[Tensor, ...]:
    """Factors with all dimensions of the result, even if the other points are broadcast."""
    others = others.expand(*distances.shape[:-2], *others.shape[-2:])
    return differences(cotangent, points, others, distances)
