"""For torchjd: a projector that solves all programs of UPGrad and DualProj together.

Needs torchjd, which this file imports.
"""

from __future__ import annotations

from torchjd.linalg import DualConeProjector

from autogram.weightings import Projector


class BatchedProjector(Projector, DualConeProjector):
    """A projector for torchjd's ``UPGrad``, ``DualProj`` and their weightings.

    Its arguments, attributes and errors are those of :class:`autogram.weightings.Projector`.

    Example:
        >>> import torch
        >>> from torchjd.aggregation import UPGrad
        >>> from autogram.integrations.torchjd import BatchedProjector
        >>> aggregator = UPGrad(projector=BatchedProjector())
        >>> aggregator(torch.tensor([[1.0, 0.0], [-1.0, 1.0]]))
        tensor([0.2499, 0.7500])
    """

    def __repr__(self) -> str:
        return f"BatchedProjector(tolerance={self.tolerance})"
