"""Weightings by projection onto the dual cone of all gradients: UPGrad and DualProj."""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor

from autogram._arguments import check_square, refuse_options
from autogram._errors import InvalidOperandError, InvalidOptionError
from autogram._weights import check_numbers
from autogram.weightings.projection import Certificate, Projector


class _DualCone:
    """A weighting by projections, with preferences and a projector."""

    def __init__(
        self,
        pref_vector: Tensor | None = None,
        projector: Projector | None = None,
        **unknown: Never,
    ) -> None:
        refuse_options(self, unknown, _DualCone.__init__)
        given: object = pref_vector
        if given is not None and not (isinstance(given, Tensor) and given.dim() == 1):
            raise InvalidOperandError(f"`pref_vector` is {given!r}. Pass a tensor `(m,)`.")
        if pref_vector is not None:
            check_numbers(pref_vector, "A `pref_vector`")
        if not (projector is None or callable(projector)):
            raise InvalidOptionError(
                f"`projector` is {projector!r}. Pass a `Projector`, or `None` for its defaults."
            )
        self.pref_vector = pref_vector
        self.projector = Projector() if projector is None else projector

    @property
    def certificate(self) -> Certificate | None:
        """How well the last weights fulfil the optimality conditions."""
        return self.projector.certificate

    def _preferences(self, gramian: Tensor) -> Tensor:
        """The preferences, ``(m,)``."""
        check_square(gramian)
        m = len(gramian)
        if self.pref_vector is None:
            return torch.full((m,), 1 / max(m, 1), dtype=torch.float64, device=gramian.device)
        if len(self.pref_vector) != m:
            raise InvalidOperandError(
                f"There are preferences of {len(self.pref_vector)} objectives, and the Gramian is "
                f"of {m}. Pass one for each in `pref_vector`."
            )
        return self.pref_vector.to(gramian.device, torch.float64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pref_vector={self.pref_vector!r})"


class UPGrad(_DualCone):
    """The weights of UPGrad: the gradient of each objective is projected, and all are added up.

    The method and its parameters are those of torchjd's ``UPGradWeighting``, with another solver:
    all m quadratic programs are solved together, on the Gramian's device, by operations on (m, m)
    matrices. The combination of gradients with these weights has no negative inner product with any
    gradient, up to the regularisation.

    Args:
        pref_vector: The preferences of the objectives, ``(m,)``; all equal to 1/m if ``None``.
        projector: How to project, with the normalisation, the regularisation and the tolerance.

    Raises:
        InvalidOperandError: ``pref_vector`` is no vector.

    Example:
        >>> import torch
        >>> from autogram.weightings import UPGrad
        >>> weighting = UPGrad()
        >>> weighting(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]))
        tensor([0.7499, 0.7499])
        >>> weighting.certificate.is_optimal
        True

    References:
        Quinton and Rey, Jacobian Descent for Multi-Objective Optimization, 2024, arXiv:2406.16232.
    """

    def __call__(self, gramian: Tensor) -> Tensor:
        """The weights ``(m,)`` for a Gramian ``(m, m)``, in its dtype and on its device.

        Cost: for up to 64 objectives, a few times m factorisations of (m, m) matrices; for more,
        some tens to hundreds of products of (m, m) matrices.

        Raises:
            InvalidOperandError: The matrix is no Gramian, or does not fit the preferences.
            NonFiniteError: The matrix has entries that are infinite or not a number.
        """
        return self.projector(torch.diag(self._preferences(gramian)), gramian).sum(0)


class DualProj(_DualCone):
    """The weights of DualProj: the mean gradient is projected.

    The method and its parameters are those of torchjd's ``DualProjWeighting``, with another solver.

    Args:
        pref_vector: The preferences of the objectives, ``(m,)``; all equal to 1/m if ``None``.
        projector: How to project, with the normalisation, the regularisation and the tolerance.

    Raises:
        InvalidOperandError: ``pref_vector`` is no vector.

    References:
        Lopez-Paz and Ranzato, Gradient Episodic Memory for Continual Learning, 2017,
        arXiv:1706.08840, equation 11.
    """

    def __call__(self, gramian: Tensor) -> Tensor:
        """The weights ``(m,)`` for a Gramian ``(m, m)``, in its dtype and on its device.

        Cost: for up to 256 objectives, a few factorisations of (m, m) matrices; for more, a
        factorisation for each 20 products of an (m, m) matrix with a vector, of which there are
        some tens to hundreds.

        Raises:
            InvalidOperandError: The matrix is no Gramian, or does not fit the preferences.
            NonFiniteError: The matrix has entries that are infinite or not a number.
        """
        return self.projector(self._preferences(gramian), gramian)
