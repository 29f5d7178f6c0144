"""Projections of combinations of gradients onto the dual cone of all gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._arguments import check_square, count_of, is_number, not_negative
from autogram.errors import (
    InexactWeightsWarning,
    InvalidOperandError,
    InvalidOptionError,
    warn_user,
)
from autogram.weightings.certificate import Certificate, error_of
from autogram.weightings.checks import check_gramian
from autogram.weightings.newton import newton, newton_steps
from autogram.weightings.pivoting import pivot
from autogram.weightings.splitting import polish, split

# Pivoting is chosen if one step takes at most this many multiply-adds.
_MOST_FOR_PIVOTING = 2**22
_MOST_PIVOTS = 40
_MOST_NEWTON_STEPS = 30  # in each dtype
# The target of Newton's method, as a part of the tolerance, and the smallest target in float32.
_AIM = 0.8
_LEAST_IN_FLOAT32 = 1e-5
# Splitting is polished if the error is at most this.
_FAR = 1.0
# A Gramian counts as positive semidefinite down to minus this part of the regularisation.
_NEGATIVE = 0.1


class Projector:
    """Projects vectors Jᵀ u onto the dual cone of the rows of J, using the Gramian G = J Jᵀ.

    The projection of Jᵀ u is Jᵀ v with the v that minimises v G v for v >= u (Quinton and Rey 2024,
    arXiv:2406.16232, proposition 1). All programs are solved together: by pivoting if that is
    cheap, else by Newton's method, and by splitting if neither converges. Pivoting starts from
    the solution of the last call, if the shapes are equal.

    Args:
        norm_eps: A Gramian with a smaller trace counts as zero. Others are divided by their trace.
        reg_eps: A number that is then added to the diagonal.
        tolerance: The largest accepted error of the weights, relative to their norm, as in
            :class:`Certificate`. For several vectors, the weights are added up.
        most: The largest number of iterations of splitting.
        iterations: A fixed number of Newton steps for any size, for CUDA graphs: such a call
            checks nothing, remembers nothing, and does not wait for the device.

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
        tolerance: float = 1e-3,
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
        self._last: Tensor | None = None

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
            if self.iterations is not None:
                weights = newton_steps(bounds, self._regular(wide), self.reg_eps, self.iterations)
            else:
                check_gramian(wide, bounds)
                weights = self._project(bounds, self._checked(wide))
            return weights.to(gramian.dtype).view(vectors.shape)

    def _regular(self, gramian: Tensor) -> Tensor:
        """The Gramian divided by its trace, with ``reg_eps`` added to its diagonal."""
        trace = gramian.diagonal().sum()
        unit = torch.where(trace < self.norm_eps, 0, gramian / trace)
        regular = (unit + unit.mT) / 2
        regular.diagonal().add_(self.reg_eps)
        return regular

    def _checked(self, gramian: Tensor) -> Tensor:
        """The same, without the negative eigenvalues that a rounded Gramian may have."""
        regular = self._regular(gramian)
        lower = regular.clone()
        lower.diagonal().sub_((1 - _NEGATIVE) * self.reg_eps)
        if int(torch.linalg.cholesky_ex(lower).info) == 0:
            return regular
        return self._regular(_without_negative_part(gramian))

    def _project(self, bounds: Tensor, gramian: Tensor) -> Tensor:
        """The weights ``(s, m)``, and a certificate of them."""
        start = bounds.clamp(min=0)
        can_pivot = len(bounds) * len(gramian) ** 3 <= _MOST_FOR_PIVOTING
        methods = [self._pivot] * can_pivot + [self._newton, self._split]
        weights, certificate = methods[0](bounds, gramian, start)
        for method in methods[1:]:
            if certificate.is_optimal:
                break
            other, its_certificate = method(bounds, gramian, weights)
            if not its_certificate.error > certificate.error:
                weights, certificate = other, its_certificate
        self.certificate = certificate
        if not certificate.is_optimal:
            warn_user(
                "Pass a larger `reg_eps`, `most` or `tolerance`: the weights are exact to "
                f"{certificate.error:.1e}, not to {self.tolerance:.1e}.",
                InexactWeightsWarning,
            )
        return weights

    def _error(self, bounds: Tensor, gramian: Tensor, point: Tensor) -> float:
        """A bound on the relative error of the sum of some rows."""
        return float(error_of(bounds, gramian, (1 - _NEGATIVE) * self.reg_eps, point))

    def _pivot(self, bounds: Tensor, gramian: Tensor, start: Tensor) -> tuple[Tensor, Certificate]:
        """The weights from pivoting, starting at the active set of the last call, if any."""
        last = self._last
        if last is not None and last.shape == bounds.shape and last.device == bounds.device:
            start = last
        weights, count = pivot(bounds, gramian, _MOST_PIVOTS, start <= bounds)
        self._last = weights
        error = self._error(bounds, gramian, weights)
        return weights, Certificate("pivoting", count, error, self.tolerance)

    def _newton(self, bounds: Tensor, gramian: Tensor, start: Tensor) -> tuple[Tensor, Certificate]:
        """The weights from Newton's method: in float32, then in float64 if that is too coarse."""
        count, aim, error = 0, _AIM * self.tolerance, torch.inf
        for dtype, goal in (
            (torch.float32, max(aim, _LEAST_IN_FLOAT32)),
            (torch.float64, aim),
            (torch.float64, aim / 10),
        ):
            u, a, v = (x.to(dtype) for x in (bounds, gramian, start))
            excess, steps = newton(u, a, v, self.reg_eps, goal, _MOST_NEWTON_STEPS)
            start = excess.double().clamp_(min=0).add_(bounds)
            count, error = count + steps, self._error(bounds, gramian, start)
            if error <= self.tolerance or steps == _MOST_NEWTON_STEPS:
                break
        return start, Certificate("newton", count, error, self.tolerance)

    def _split(self, bounds: Tensor, gramian: Tensor, start: Tensor) -> tuple[Tensor, Certificate]:
        """The weights from splitting, polished whenever the active set may be correct."""
        best, error = start, torch.inf

        def is_done(point: Tensor) -> bool:
            nonlocal best, error
            for tried in (point, polish(bounds, gramian, point)):
                its_error = self._error(bounds, gramian, tried)
                if its_error < error:
                    best, error = tried, its_error
                if its_error > _FAR:
                    break
            return error <= self.tolerance

        count = split(bounds, gramian, start, is_done, self.most)
        return best, Certificate("splitting", count, error, self.tolerance)


def _without_negative_part(gramian: Tensor) -> Tensor:
    """The nearest matrix without negative eigenvalues, which a rounded Gramian may have.

    Nearest in the Frobenius norm: Higham 1988, doi:10.1016/0024-3795(88)90223-6.
    """
    values, vectors = torch.linalg.eigh((gramian + gramian.mT) / 2)
    nearest: Tensor = (vectors * values.clamp(min=0)) @ vectors.mT
    return nearest
