"""Linear systems with a Gramian."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autogram._arguments import is_number
from autogram.errors import InvalidOperandError, NonFiniteError


def check_damping(damping: Any) -> None:
    """Refuses anything but a number that is not negative."""
    is_single = isinstance(damping, Tensor) and damping.numel() == 1 and not damping.is_complex()
    if not (is_number(damping) or is_single) or not damping >= 0:
        raise InvalidOperandError(f"The damping is {damping!r}. Pass zero, or a positive number.")


def damped_solution(gramian: Tensor, values: Tensor, damping: float) -> Tensor:
    """The solution w of (G + damping I) w = v, ``(m,)`` in the dtype of G, of least norm."""
    matrix, right = gramian.double(), values.to(gramian.device).double()
    if not bool(matrix.isfinite().all() & right.isfinite().all()):
        raise NonFiniteError(
            "The system of the residuals has entries that are infinite or not a number. Look for a "
            "division by zero or an overflow in the objectives; "
            "`torch.autograd.detect_anomaly()` finds it."
        )
    if damping:
        damped = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return torch.cholesky_solve(right.unsqueeze(1), factor).squeeze(1).to(gramian.dtype)
    eigenvalues, vectors, is_above = eigenvalues_above_rounding(gramian)
    inverse = torch.where(is_above, 1 / (eigenvalues + damping), 0)
    solution: Tensor = vectors @ (inverse * (vectors.mT @ right))
    return solution.to(gramian.dtype)


def eigenvalues_above_rounding(gramian: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and vectors in float64, and which eigenvalues do not come from rounding."""
    eigenvalues, vectors = torch.linalg.eigh(gramian.double())
    # Those up to this size may come from rounding of the Gramian, in the dtype of its sums.
    largest = eigenvalues.abs().amax() if len(gramian) else 0.0
    rounding = len(gramian) * torch.finfo(gramian.dtype).eps * largest
    return eigenvalues, vectors, eigenvalues > rounding
