"""Checks of the matrices for weightings."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._arguments import check_square
from autogram.errors import InvalidOperandError, NonFiniteError

# A Gramian counts as symmetric if it differs from its transpose by at most this part of its trace.
_ASYMMETRY = 1e-3


def check_gramian(gramian: Tensor, vectors: Tensor | None = None) -> None:
    """Refuses a matrix that is not a Gramian. Waits for the device once.

    Args:
        gramian: The matrix.
        vectors: Vectors of the same size, ``(*, m)``, which must be finite as well.

    Raises:
        InvalidOperandError: The matrix is not square, not symmetric, or has a negative diagonal.
        NonFiniteError: An entry is infinite or not a number.
    """
    check_square(gramian)
    if not gramian.numel():
        return
    trace = gramian.diagonal().sum()
    asymmetry = (gramian - gramian.mT).abs().amax() / trace.clamp(min=torch.finfo(trace.dtype).tiny)
    is_finite = gramian.isfinite().all()
    if vectors is not None:
        is_finite = is_finite & vectors.isfinite().all()
    least = gramian.diagonal().amin()
    finite, apart, diagonal = torch.stack(
        [is_finite.double(), asymmetry.double(), least.double()]
    ).tolist()
    if not finite:
        raise NonFiniteError(
            "The Gramian, or a vector to project, has entries that are infinite or not a number. "
            "Look for a division by zero or an overflow in the losses. If a gradient scaler has "
            "scaled them, pass the unscaled losses and the scaler to the engine: "
            "`engine.backward(losses, weighting, scaler=scaler)`."
        )
    if apart > _ASYMMETRY or diagonal < 0:
        raise InvalidOperandError(
            f"The matrix is not a Gramian: it differs from its transpose by {apart:.1e} of its "
            f"trace, and its least diagonal entry is {diagonal:.1e}. Pass `J @ J.T`, which is "
            "symmetric, with squared norms on its diagonal."
        )
