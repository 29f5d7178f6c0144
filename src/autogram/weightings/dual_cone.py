"""Weightings by projection onto the dual cone of all gradients: UPGrad and DualProj."""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor

from autogram._arguments import check_square, count_of, refuse_options
from autogram._weights import check_numbers
from autogram.errors import InvalidOperandError, InvalidOptionError
from autogram.weightings.certificate import Certificate
from autogram.weightings.projection import Projector
from autogram.weightings.scale import WeightScale, check_scale, scaled


class _DualCone:
    """A weighting that projects, with preferences, a projector and a scale."""

    def __init__(
        self,
        pref_vector: Tensor | None = None,
        projector: Projector | None = None,
        *,
        scale: WeightScale = "method",
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
        check_scale(scale)
        self.pref_vector = pref_vector
        self.projector = Projector() if projector is None else projector
        self.scale: WeightScale = scale

    @property
    def certificate(self) -> Certificate | None:
        """The accuracy of the last weights."""
        return self.projector.certificate

    def _preferences(self, gramian: Tensor) -> Tensor:
        """The preferences, ``(m,)``."""
        check_square(gramian)
        m = len(gramian)
        if self.pref_vector is None:
            return torch.full((m,), 1 / max(m, 1), dtype=torch.float64, device=gramian.device)
        if len(self.pref_vector) != m:
            raise InvalidOperandError(
                f"There are {len(self.pref_vector)} preferences, and the Gramian has {m} "
                "objectives. Pass one for each in `pref_vector`."
            )
        return self.pref_vector.to(gramian.device, torch.float64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pref_vector={self.pref_vector!r})"


class UPGrad(_DualCone):
    r"""The weights of UPGrad: each objective's gradient is projected, and the results are added.

    The method and its parameters are those of torchjd's ``UPGradWeighting``, with another solver:
    all m quadratic programs are solved together, on the Gramian's device, with operations on (m, m)
    matrices. The weighted combination of gradients has no negative inner product with any
    gradient, up to the regularisation.

    With ``samples=s``, only s of the m rows are projected, times m / s, for s / m of the cost. Each
    projection is in the dual cone, so the step conflicts with no gradient, as before. The
    expected weights are those of all rows. Their variance, the expected squared distance
    from the weights w = sum of all v_i, is m^2 / s * (1 - s / m) * V, with V = sum of
    \|v_i - w / m\|^2 / (m - 1), as always when drawing without replacement.

    Args:
        pref_vector: The preferences of the objectives, ``(m,)``; all equal to 1/m if ``None``.
        projector: The solver, with the normalisation, the regularisation and the tolerance.
        scale: ``"method"`` leaves the weights as the method defines them. ``"mean"`` divides them
            by their sum, so that a learning rate for the mean loss keeps its meaning.
        samples: The number of rows to project, chosen at random in each call; all if ``None``.
        seed: The seed of ``generator``, which draws only this choice.

    Raises:
        InvalidOperandError: ``pref_vector`` is not a vector.
        InvalidOptionError: ``scale`` has another value, or ``samples`` is not positive, or is given
            together with a projector with a fixed number of iterations: a CUDA graph would choose
            the same rows in each replay.

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

    def __init__(
        self,
        pref_vector: Tensor | None = None,
        projector: Projector | None = None,
        *,
        scale: WeightScale = "method",
        samples: int | None = None,
        seed: int = 0,
        **unknown: Never,
    ) -> None:
        refuse_options(self, unknown, UPGrad.__init__)
        super().__init__(pref_vector, projector, scale=scale)
        if samples is not None:
            samples = count_of("samples", samples, ", or `None`")
        if samples is not None and self.projector.iterations is not None:
            raise InvalidOptionError(
                "Both `samples` and a projector with `iterations` are given. A CUDA graph would "
                "choose the same samples in each replay. Leave out one of them."
            )
        self.samples = samples
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __call__(self, gramian: Tensor) -> Tensor:
        """The weights ``(m,)`` for a Gramian ``(m, m)``, in its dtype and on its device.

        Cost: for up to 45 objectives, a few times m factorisations of (m, m) matrices; for more,
        some ten to fifty products of (m, m) matrices.

        Raises:
            InvalidOperandError: The matrix is not a Gramian, or does not fit the preferences.
            NonFiniteError: The matrix has entries that are infinite or not a number.

        Warns:
            InexactWeightsWarning: The tolerance of the projector was not reached.
        """
        vectors = torch.diag(self._preferences(gramian))
        m = len(vectors)
        if self.samples is not None and self.samples < m:
            chosen = torch.randperm(m, generator=self.generator, device="cpu")[: self.samples]
            vectors = vectors[chosen.to(vectors.device)] * (m / self.samples)
        return scaled(self.projector(vectors, gramian).sum(0), self.scale)


class DualProj(_DualCone):
    """The weights of DualProj: the mean gradient is projected.

    The method and its parameters are those of torchjd's ``DualProjWeighting``, with another solver.

    Args:
        pref_vector: The preferences of the objectives, ``(m,)``; all equal to 1/m if ``None``.
        projector: The solver, with the normalisation, the regularisation and the tolerance.
        scale: ``"method"`` leaves the weights as the method defines them. ``"mean"`` divides them
            by their sum, so that a learning rate for the mean loss keeps its meaning.

    Raises:
        InvalidOperandError: ``pref_vector`` is not a vector.
        InvalidOptionError: ``scale`` has another value.

    References:
        Lopez-Paz and Ranzato, Gradient Episodic Memory for Continual Learning, 2017,
        arXiv:1706.08840, equation 11.
    """

    def __call__(self, gramian: Tensor) -> Tensor:
        """The weights ``(m,)`` for a Gramian ``(m, m)``, in its dtype and on its device.

        Cost: for up to 160 objectives, a few factorisations of an (m, m) matrix; for more, some
        tens of products of an (m, m) matrix with a vector.

        Raises:
            InvalidOperandError: The matrix is not a Gramian, or does not fit the preferences.
            NonFiniteError: The matrix has entries that are infinite or not a number.

        Warns:
            InexactWeightsWarning: The tolerance of the projector was not reached.
        """
        return scaled(self.projector(self._preferences(gramian), gramian), self.scale)
