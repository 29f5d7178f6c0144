"""Projections of combinations of gradients onto the dual cone of all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autogram._arguments import check_square, count_of, is_number, not_negative
from autogram._errors import (
    InexactWeightsWarning,
    InvalidOperandError,
    InvalidOptionError,
    warn_user,
)
from autogram.weightings.checks import check_gramian
from autogram.weightings.pivoting import pivot
from autogram.weightings.splitting import State, first_state, polish, split

# Pivoting is chosen if one step has at most this many multiply-adds.
_MOST_FOR_PIVOTING = 2**24
_MOST_PIVOTS = 40
# Splitting goes on in float64 once the residual in float32 is below this.
_COARSE = 1e-5


@dataclass(frozen=True)
class Certificate:
    """How well some weights fulfil the optimality conditions.

    The conditions of min v G v for v >= u are that G v is not negative, and zero where v > u.

    Attributes:
        method: ``"pivoting"``, which is exact but for rounding, or ``"splitting"``, which iterates.
        iterations: Steps of the method.
        residual: The largest violation of a condition, relative to the largest value that an entry
            of G v would have if all gradients had one direction: the largest norm of a gradient,
            times the sum of all norms, weighted by the absolute entries of v. G is normalised and
            regularised.
        tolerance: The largest residual that is accepted.
    """

    method: Literal["pivoting", "splitting"]
    iterations: int
    residual: float
    tolerance: float

    @property
    def is_optimal(self) -> bool:
        """Whether the residual is within the tolerance."""
        return self.residual <= self.tolerance


class Projector:
    """Projects vectors Jᵀ u onto the dual cone of the rows of J, by the Gramian G = J Jᵀ.

    The projection of Jᵀ u is Jᵀ v with the v that minimises v G v for v >= u (Quinton and Rey 2024,
    arXiv:2406.16232, proposition 1). All programs are solved together: by pivoting where that is
    cheap, else by splitting and polishing. Each call starts from the solution of the last call, if
    the shapes are equal.

    Args:
        norm_eps: A Gramian with a smaller trace counts as zero. Others are divided by their trace.
        reg_eps: A number that is added to the diagonal after that. All is computed in float64.
        tolerance: The largest violation of the optimality conditions that is accepted, as
            :class:`Certificate` measures it.
        most: The number of iterations of splitting after which to stop.
        iterations: A fixed number of iterations of splitting, whatever the size, for CUDA graphs:
            nothing is checked, nothing is remembered, and nothing waits for the device.

    Attributes:
        certificate: The certificate of the last call; ``None`` with a fixed number of iterations.

    Raises:
        InvalidOptionError: An argument is negative, or not positive where it must be.
    """

    def __init__(
        self,
        *,
        norm_eps: float = 1e-4,
        reg_eps: float = 1e-4,
        tolerance: float = 1e-9,
        most: int = 20_000,
        iterations: int | None = None,
    ) -> None:
        for name, value in (("reg_eps", reg_eps), ("tolerance", tolerance)):
            if not (is_number(value) and value > 0):
                raise InvalidOptionError(
                    f"The option `{name}` is {value!r}. Pass a positive number."
                )
        self.norm_eps = not_negative("norm_eps", norm_eps)
        self.reg_eps = float(reg_eps)
        self.tolerance = float(tolerance)
        self.most = count_of("most", most)
        self.iterations = None
        if iterations is not None:
            self.iterations = count_of("iterations", iterations, ", or `None`")
        self.certificate: Certificate | None = None
        self._last: State | None = None

    def __call__(self, vectors: Tensor, gramian: Tensor) -> Tensor:
        """The weights v of the projections, of the shape of the vectors ``(*, m)``.

        Raises:
            InvalidOperandError: The Gramian is not square, not symmetric, has a negative diagonal,
                or does not fit the vectors.
            NonFiniteError: The Gramian or a vector has entries that are not finite.

        Warns:
            InexactWeightsWarning: The tolerance was not reached.
        """
        check_square(gramian)
        m = len(gramian)
        if vectors.shape[-1:] != (m,):
            raise InvalidOperandError(
                f"The vectors have shape {tuple(vectors.shape)}, and the Gramian has "
                f"{tuple(gramian.shape)}. Pass vectors `(*, m)` and a Gramian `(m, m)`."
            )
        if not vectors.numel():
            return vectors.clone()
        with torch.no_grad():
            bounds = vectors.detach().reshape(-1, m).to(gramian.device, torch.float64)
            wide = gramian.detach().double()
            if self.iterations is None:
                check_gramian(wide, bounds)
            try:
                found = self._project(bounds, self._regular(wide))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # of rounded Gramians
                found = self._project(bounds, self._regular(_without_negative_part(wide)))
            return found.to(gramian.dtype).view(vectors.shape)

    def _regular(self, gramian: Tensor) -> Tensor:
        """The Gramian divided by its trace, with ``reg_eps`` added to its diagonal."""
        trace = gramian.diagonal().sum()
        unit = torch.where(trace < self.norm_eps, torch.zeros_like(gramian), gramian / trace)
        eye = torch.eye(len(gramian), dtype=unit.dtype, device=unit.device)
        return (unit + unit.mT) / 2 + self.reg_eps * eye

    def _project(self, bounds: Tensor, gramian: Tensor) -> Tensor:
        """The weights ``(s, m)``, and a certificate of them."""
        if self.iterations is not None:
            state, _ = split(bounds, gramian, first_state(bounds, gramian), None, self.iterations)
            return polish(bounds, gramian, state.point)
        can_pivot = len(bounds) * len(gramian) ** 3 <= _MOST_FOR_PIVOTING
        start = self._start(bounds, gramian)
        if can_pivot:
            found, certificate = self._pivot(bounds, gramian, start)
        if not can_pivot or not certificate.is_optimal:
            found, certificate = self._split(bounds, gramian, start)
        if can_pivot and not certificate.is_optimal:  # from an active set that is about right
            assert self._last is not None
            found, certificate = self._pivot(bounds, gramian, self._last)
        self.certificate = certificate
        if not certificate.is_optimal:
            warn_user(
                f"The weights fulfil the optimality conditions to {certificate.residual:.1e}, "
                f"and not to {self.tolerance:.1e}. Pass a larger `reg_eps`, `most` or `tolerance`.",
                InexactWeightsWarning,
            )
        return found

    def _pivot(self, bounds: Tensor, gramian: Tensor, start: State) -> tuple[Tensor, Certificate]:
        """The weights by pivoting, from the active set of a state."""
        found, count = pivot(bounds, gramian, _MOST_PIVOTS, start.point <= bounds)
        residual = float(residual_of(bounds, gramian, found))
        self._last = State(found, torch.zeros_like(found), start.penalty)
        return found, Certificate("pivoting", count, residual, self.tolerance)

    def _split(self, bounds: Tensor, gramian: Tensor, start: State) -> tuple[Tensor, Certificate]:
        """The weights by splitting, polished whenever the active set may be right."""
        best, residual = bounds, torch.inf

        def is_done(state: State) -> bool:
            nonlocal best, residual
            for point in (state.point, polish(bounds, gramian, state.point)):
                found = float(residual_of(bounds, gramian, point))
                if found < residual:
                    best, residual = point, found
                if residual <= self.tolerance or found > 1e-3:  # far from the active set
                    break
            return residual <= self.tolerance

        # The active set is about right before more digits than those of float32 are needed.
        narrow = bounds.float(), gramian.float()
        coarse, first = split(
            *narrow,
            start.to(torch.float32),
            lambda state: float(residual_of(*narrow, state.point)) < _COARSE,
            self.most,
        )
        start = coarse.to(torch.float64)
        start = start._replace(point=torch.maximum(start.point, bounds))
        self._last, count = split(bounds, gramian, start, is_done, self.most)
        if residual > self.tolerance:
            is_done(self._last)  # which nothing has asked about, where all iterations were made
        return best, Certificate("splitting", first + count, residual, self.tolerance)

    def _start(self, bounds: Tensor, gramian: Tensor) -> State:
        """The state of the last call, if it fits, and else the first one."""
        last = self._last
        if last is None or last.point.shape != bounds.shape or last.point.device != bounds.device:
            return first_state(bounds, gramian)
        return last._replace(point=torch.maximum(last.point, bounds))


def residual_of(bounds: Tensor, gramian: Tensor, point: Tensor) -> Tensor:
    """The largest violation of the optimality conditions, as :class:`Certificate` measures it."""
    pull = point @ gramian
    norms = gramian.diagonal().sqrt()
    scale = ((point.abs() @ norms) * norms.amax()).clamp(min=torch.finfo(point.dtype).tiny)
    violation = torch.where(point > bounds, pull.abs(), (-pull).clamp(min=0))
    below = (bounds - point).clamp(min=0).amax(1) / bounds.abs().amax().clamp(min=1e-300)
    return torch.maximum(violation.amax(1) / scale, below).amax()


def _without_negative_part(gramian: Tensor) -> Tensor:
    """The nearest matrix without negative eigenvalues, which a rounded Gramian may have.

    Nearest in the Frobenius norm: Higham 1988, doi:10.1016/0024-3795(88)90223-6.
    """
    values, vectors = torch.linalg.eigh((gramian + gramian.mT) / 2)
    nearest: Tensor = (vectors * values.clamp(min=0)) @ vectors.mT
    return nearest
