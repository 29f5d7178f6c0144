"""For torchjd: a projector that solves all programs of UPGrad and DualProj together.

Needs torchjd, which this file imports.
"""

from __future__ import annotations

from torch import Tensor
from torchjd.linalg import DualConeProjector

from autogram.weightings import Certificate, Projector


class BatchedProjector(DualConeProjector):
    """A projector for torchjd's ``UPGrad``, ``DualProj`` and their weightings.

    Args:
        norm_eps: As of torchjd's ``QuadprogProjector``.
        reg_eps: As of torchjd's ``QuadprogProjector``.
        tolerance: For the optimality conditions, as :class:`autogram.weightings.Certificate`
            measures them.

    Raises:
        InvalidOptionError: An argument is negative, or not positive where it must be.

    Example:
        >>> import torch
        >>> from torchjd.aggregation import UPGrad
        >>> from autogram.integrations.torchjd import BatchedProjector
        >>> aggregator = UPGrad(projector=BatchedProjector())
        >>> aggregator(torch.tensor([[1.0, 0.0], [-1.0, 1.0]]))
        tensor([0.2499, 0.7500])
    """

    def __init__(
        self, *, norm_eps: float = 1e-4, reg_eps: float = 1e-4, tolerance: float = 1e-9
    ) -> None:
        self._projector = Projector(norm_eps=norm_eps, reg_eps=reg_eps, tolerance=tolerance)

    @property
    def certificate(self) -> Certificate | None:
        """How well the last weights fulfil the optimality conditions."""
        return self._projector.certificate

    def __call__(self, U: Tensor, G: Tensor) -> Tensor:
        """The weights of the projections of Jᵀ u for all vectors u, of the shape of ``U``."""
        return self._projector(U, G)

    def __repr__(self) -> str:
        return f"BatchedProjector(tolerance={self._projector.tolerance})"
