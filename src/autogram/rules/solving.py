"""Rules of linear systems and of distances.

With Y the solution of A Y = B, and g its cotangent (Giles 2008, "An extended collection of matrix
derivative results"),

    h = A^-T g        dA = -h Y^T        (for a triangular A, only its triangle)

and with d[p, r] = |x[p] - y[r]| and t = g / d, zero where d is zero,

    dy[r] = sum_p t[p, r] (y[r] - x[p])        dx[p] = sum_r t[p, r] (x[p] - y[r])
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from autogram.rules._recipe import Recipe, broadcast, product, promoted
from autogram.rules._registry import register_rule


@register_rule(torch.linalg.solve)
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> list[Recipe] | None:
    """The matrix of a linear system, if it is the same for all samples."""
    return _of_matrix(A, B, left, torch.linalg.solve, {"left": left}, {"left": left})


@register_rule(torch.linalg.solve_triangular)
def solve_triangular(
    A: Tensor,
    B: Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> list[Recipe] | None:
    """The triangular matrix of a linear system, if it is the same for all samples."""
    options = {"left": left, "unitriangular": unitriangular}
    forward, adjoint = options | {"upper": upper}, options | {"upper": not upper}
    return _of_matrix(A, B, left, torch.linalg.solve_triangular, forward, adjoint)


def _of_matrix(
    matrix: Tensor, other: Tensor, left: bool, function: Any, forward: Any, adjoint: Any
) -> list[Recipe] | None:
    """The recipe of the matrix, which may have leading dimensions of size one."""
    is_vector = other.dim() < 2 or other.shape == matrix.shape[:-1]
    if is_vector or any(n != 1 for n in matrix.shape[:-2]):
        return None
    t, (_, of_other) = broadcast(max(matrix.dim(), other.dim()) - 2, other.dim() - 2)
    cotangent, solution, dims = ("ip", "jp", "-p") if left else ("pj", "pi", "p-")
    equation = f"{t}{cotangent},{of_other}{solution}"
    if "upper" in forward:
        equation += ",ij"
    target = "1" * (matrix.dim() - 2) + "ij"
    prepare = partial(_solved, function, forward, adjoint)
    saved = matrix, other
    return [product(matrix, f"{equation}->{target}", *saved, prepare=prepare, dims=t + dims)]


def _solved(
    function: Any, forward: Any, adjoint: Any, cotangent: Tensor, matrix: Tensor, other: Tensor
) -> tuple[Tensor, ...]:
    """The negative cotangent of the other side, the solution, and where the matrix is not zero."""
    cotangent, matrix, other = promoted(cotangent, matrix, other)
    matrix = matrix.reshape(matrix.shape[-2:])
    factors = -function(matrix.mT, cotangent, **adjoint), function(matrix, other, **forward)
    if "upper" not in forward:
        return factors
    return *factors, triangle_of(matrix, forward["upper"], forward["unitriangular"])


def triangle_of(matrix: Tensor, upper: bool, unitriangular: bool) -> Tensor:
    """Ones in the used triangle of a matrix, and zeros elsewhere."""
    ones, skipped = torch.ones_like(matrix), int(unitriangular)
    return ones.triu(skipped) if upper else ones.tril(-skipped)


@register_rule(torch.cdist)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, **options: Any) -> list[Recipe] | None:
    """Both sets of points of Euclidean distances."""
    if p != 2:
        return None
    recipes = []
    for own, other, index in ((x1, x2, "p"), (x2, x1, "r")):
        if all(n == 1 for n in own.shape[:-2]):
            t, (_, of_other) = broadcast(max(own.dim(), other.dim()) - 2, other.dim() - 2)
            opposite = "r" if index == "p" else "p"
            factors = f"s{index}m,s{of_other}{opposite}m"
            target = "1" * (own.dim() - 2) + f"{index}m"
            prepare = partial(_moved, index == "p", options)
            recipes.append(product(own, f"{t}pr,{factors}->{target}", x1, x2, prepare=prepare))
    return recipes


def _moved(
    is_first: bool, options: dict[str, Any], cotangent: Tensor, x1: Tensor, x2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangent over the distances, and the two terms of the difference of points."""
    cotangent, x1, x2 = promoted(cotangent, x1, x2)
    own, other = (x1, x2) if is_first else (x2, x1)
    return differences(cotangent, own, other, torch.cdist(x1, x2, **options))


def differences(
    cotangent: Tensor, own: Tensor, other: Tensor, distances: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangent over the distances, and the two terms of own minus other points."""
    own = own.reshape(own.shape[-2:])
    scaled = torch.where(distances > 0, cotangent / distances, 0)
    return (
        scaled,
        torch.stack((own, -torch.ones_like(own))),
        torch.stack((torch.ones_like(other), other)),
    )
