"""The influence of samples on their own losses."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._arguments import check_square
from autogram._jacobian.solve import check_damping, eigenvalues_above_rounding
from autogram.errors import NonFiniteError


def self_influence(gramian: Tensor, damping: float) -> Tensor:
    """gᵀ (JᵀJ + damping I)⁻¹ g for the gradient g of each objective, from the Gramian alone.

    By the push-through identity J (JᵀJ + λ I)⁻¹ Jᵀ = G (G + λ I)⁻¹, these are the diagonal
    entries of an ``(m, m)`` matrix: no system in the parameters is solved. Each is between 0 and
    1. It is near 1 for an objective whose gradient is unlike all others, such as that of a wrong
    label or an outlier, and near ‖g‖² / damping if the damping is large.

    JᵀJ is the Gauss-Newton matrix of the sum of squares if the objectives are residuals, and m
    times the empirical Fisher matrix if they are losses of samples. For (JᵀJ / m + λ I)⁻¹, take
    ``m * self_influence(gramian, m * λ)``.

    Args:
        gramian: G = J Jᵀ, ``(m, m)``, symmetric, from :meth:`autogram.Engine.compute_gramian`,
            :meth:`autogram.Jacobian.gramian` or :meth:`autogram.Sketch.gramian`.
        damping: λ, not negative, in the units of G. Zero gives the leverage scores; directions in
            which G is zero to rounding are left out.

    Returns:
        Values ``(m,)`` in the dtype of the Gramian, from its eigenvalues in float64.

    Raises:
        InvalidOperandError: The Gramian is not square, or the damping is negative.
        NonFiniteError: The Gramian is not finite.

    References:
        Koh and Liang 2017, arXiv:1703.04730 (influence functions); Hoaglin and Welsch 1978
        (leverage, the hat matrix).

    Example:
        >>> import torch
        >>> from autogram.attribution import self_influence
        >>> rows = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> self_influence(rows @ rows.T, damping=0.0)
        tensor([1.0000, 0.5000, 0.5000])
    """
    check_square(gramian)
    check_damping(damping)
    if not bool(gramian.isfinite().all()):
        raise NonFiniteError(
            "The Gramian has entries that are infinite or not a number, so self-influence is "
            "undefined. Look for a division by zero or an overflow in the objectives; "
            "`torch.autograd.detect_anomaly()` finds it."
        )
    eigenvalues, vectors, is_above = eigenvalues_above_rounding(gramian)
    # Each factor is below one, and no two terms cancel.
    factors = torch.where(is_above, eigenvalues / (eigenvalues + damping), 0)
    return (vectors.square() @ factors).clamp(max=1).to(gramian.dtype)
