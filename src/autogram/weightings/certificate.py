"""A bound on the distance between computed weights and the exact projection.

Let v >= u be any point of the program min v A v for v >= u, v* its solution, and A >= d I. With
y = A v, the optimality of v* gives, for e = v - v*,

    d |e|^2 <= e A e <= sum_j e_j y_j.

An entry of this sum is at most |e_j| |y_j|. Where y_j is positive, it is also at most
(v_j - u_j) y_j, as v* >= u. Take the second where v_j - u_j < y_j / d. With r the y_j of all other
entries, and c the sum of the (v_j - u_j) y_j,

    d |e|^2 <= |r| |e| + c,    so that    |e| <= (|r| + sqrt(|r|^2 + 4 d c)) / (2 d).

Error bounds of this kind are surveyed by Pang, Error Bounds in Mathematical Programming, 1997,
doi:10.1007/BF02614322.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Certificate:
    """The accuracy of some weights.

    Attributes:
        method: ``"pivoting"``, which is exact up to rounding, or ``"newton"`` or ``"splitting"``,
            which iterate.
        iterations: Steps of the method.
        error: An upper bound on the norm of w - w*, relative to the norm of the weights w. The
            exact weights w* belong to the given Gramian, normalised and regularised, and without
            negative eigenvalues from rounding.
        tolerance: The largest accepted error.
    """

    method: Literal["pivoting", "newton", "splitting"]
    iterations: int
    error: float
    tolerance: float

    @property
    def is_optimal(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


def error_of(bounds: Tensor, gramian: Tensor, shift: float, point: Tensor) -> Tensor:
    """A bound on the error of the sum w of all rows of a point, relative to the norm of w.

    If rows cancel in w, the error is relative to the root of the sum of their squared norms.

    Args:
        bounds: u, ``(s, m)``.
        gramian: A, ``(m, m)``.
        shift: d, a lower bound on A.
        point: v, ``(s, m)``, not below the bounds.
    """
    pull, excess = point @ gramian, point - bounds
    counts = (excess - pull / shift).sign_().add_(0.5).sign_()  # 1 where r has the entry, else -1
    products = excess * pull
    gap = (products - products * counts).sum(1) / 2
    norm = (pull + pull * counts).norm(dim=1) / 2
    errors = (norm + (norm.square() + 4 * shift * gap).sqrt()) / (2 * shift)
    size = torch.maximum(point.sum(0).norm(), point.norm())
    relative: Tensor = errors.sum() / size.clamp(min=torch.finfo(size.dtype).tiny)
    return relative
