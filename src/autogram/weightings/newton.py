"""Projections onto a dual cone with a semismooth Newton method: for many objectives.

The solution of the program min v A v for v >= u, with A = K + d I, is the v at which

    n(v) = min(v - u, A v / d)

is zero: v is at its bound u where A v is positive, and A v is zero where v is free. K n(v) is the
gradient of a convex function of v, so slopes can determine the length of a step. A Newton
step sets v to u at the bound entries B, and solves A_FF v_F = -A_FB u_B for the free
entries F. All rows take their steps together:

* One product of (m, m) matrices serves all rows, in a step and in an iteration of its solver.
* Conjugate gradients solve the systems, to a fraction of their step, with the
  preconditioner of `low_rank`.
* The norm of n(v) is about the error bound of v that `certificate` computes. Rows with a small
  norm leave the iteration.

Hintermüller, Ito and Kunisch, The Primal-Dual Active Set Strategy as a Semismooth Newton Method,
2002, doi:10.1137/S1052623401383558.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autogram.weightings.low_rank import LowRank

# A step is shortened if the slope at its end exceeds this part of the slope at its beginning,
# unless it reduces the norm of n(v) to this part.
_STEEP = 0.5
_SMALLER = 0.5
_HALVINGS = 7
# Conjugate gradients end when the error of a row, in the metric of A, is this part of its step, and
# its residual this part of n(v), or after this number of iterations.
_INNER_ERROR = 0.15
_INNER_RESIDUAL = 0.25
_MOST_INNER = 25
# They also end when this part of the rows is left: a new step is then cheaper.
_FEW = 0.2
# Finished rows leave the iteration once they are this part of all.
_ENDED = 0.2


class _Rows(NamedTuple):
    """The rows of an iteration.

    Attributes:
        size: The norm of u, ``(s, 1)``.
        excess: v - u, ``(s, m)``.
        pull: A v, ``(s, m)``.
        residual: n(v), ``(s, m)``.
        side: Positive at entries that are free in the next step, ``(s, m)``.
    """

    size: Tensor
    excess: Tensor
    pull: Tensor
    residual: Tensor
    side: Tensor

    def at(self, index: Tensor) -> _Rows:
        """Some of the rows."""
        return _Rows(*(x.index_select(0, index) for x in self))


def newton(
    bounds: Tensor, gramian: Tensor, point: Tensor, shift: float, goal: float, most: int
) -> tuple[Tensor, int]:
    """Iterates towards the minima of v A v for v >= u, for each row u of the bounds.

    Args:
        bounds: ``(s, m)``.
        gramian: A, in the dtype of the iteration.
        point: The start, ``(s, m)``.
        shift: d, a lower bound on A.
        goal: The target for the sum of all rows' errors, relative to the norm of their sum.
        most: The largest number of steps.

    Returns:
        v - u ``(s, m)``, and the number of steps.
    """
    rows, model = _first_rows(bounds, gramian, point, shift), None
    whole, places = rows.excess, torch.arange(len(bounds), device=bounds.device)
    total, ended = point.sum(0), gramian.new_zeros(())
    # At the end, an entry below its bound is raised, which changes n(v) by about this factor.
    weight = gramian.norm(dim=1).amax() / shift
    rounding = torch.finfo(gramian.dtype).eps * gramian.norm() / shift  # of n(v), relative to v
    for count in range(most + 1):
        errors = rows.residual.norm(dim=1) + weight * rows.excess.clamp(max=0).norm(dim=1)
        aim = goal * total.norm()
        least = rounding * (rows.size + rows.excess.norm(dim=1, keepdim=True)).squeeze(1)
        is_open = errors > torch.maximum(aim / len(bounds), least)
        left = int(torch.where(errors.sum() + ended > aim, is_open.sum(), 0))
        if not left or count == most:
            break
        if left < (1 - _ENDED) * len(errors):
            whole = whole.index_copy(0, places, rows.excess)
            ended = ended + errors[~is_open].sum()
            index = is_open.nonzero().squeeze(1)
            places, rows = places[index], rows.at(index)
        model = LowRank(gramian, shift) if model is None else model
        rows, change = _step(rows, gramian, shift, model)
        total = total - change
    return whole.index_copy(0, places, rows.excess), count


def newton_steps(bounds: Tensor, gramian: Tensor, shift: float, count: int) -> Tensor:
    """The rows v ``(s, m)`` after a fixed number of steps, which read no value on the host."""
    rows = _first_rows(bounds, gramian, bounds.clamp(min=0), shift)
    model = LowRank(gramian, shift)
    for _ in range(count):
        rows, _ = _step(rows, gramian, shift, model, is_fixed=True)
    return rows.excess.clamp(min=0) + bounds


def _first_rows(bounds: Tensor, gramian: Tensor, point: Tensor, shift: float) -> _Rows:
    """The rows at a point."""
    excess, pull = point - bounds, point @ gramian
    size = bounds.norm(dim=1, keepdim=True)
    return _Rows(size, excess, pull, _residual(excess, pull, shift), excess)


def _residual(excess: Tensor, pull: Tensor, shift: float) -> Tensor:
    """n(v) = min(v - u, A v / d)."""
    return torch.minimum(excess, pull / shift)


def _step(
    rows: _Rows, gramian: Tensor, shift: float, model: LowRank, *, is_fixed: bool = False
) -> tuple[_Rows, Tensor]:
    """The rows after a step, and the decrease of their sum."""
    size, excess, pull, residual, side = rows
    free = side.sign().clamp_(min=0)
    factors, t = model.factors(free), model.level
    back = model.correct(torch.lerp(t * excess, pull, free), factors)
    step = torch.lerp(excess, (pull - back) / t, free)  # to subtract
    image = step @ gramian
    systems = _Systems(
        step,
        image,
        right=(pull - image).mul_(free),
        free=free,
        factors=factors,
        most_energy=_INNER_ERROR**2 * t * _dot(step, image),
        most_norm=_INNER_RESIDUAL * shift * _norm(residual),
    )
    step, image = _refine(systems, gramian, model, is_fixed=is_fixed)
    end, end_pull = excess - step, pull - image
    end_residual = _residual(end, end_pull, shift)
    # The slopes of the convex function along the step.
    curved = torch.sub(image, step, alpha=shift)  # K times the step
    slope, end_slope = _dot(curved, residual).abs(), -_dot(curved, end_residual)
    rounding = 8 * torch.finfo(step.dtype).eps * (size + _norm(excess) + _norm(step))
    is_steep = end_slope > _STEEP * slope + rounding * _norm(curved)
    is_long = is_steep & (_norm(end_residual) > _SMALLER * _norm(residual))
    # If a system was not solved exactly, A v / d is far from v - u. Therefore, signs decide which
    # entries are free, except after a shortened step, where the slope must fall.
    ends = [end, end_pull, end_residual, torch.lerp(-end_pull, end, free)]
    places = torch.arange(len(step), device=step.device)
    if not is_fixed:
        places = places[is_long.squeeze(1)]
    if len(places):
        less, bent, is_long = step[places], image[places], is_long[places]
        start, start_pull = excess[places], pull[places]
        length = torch.where(is_long, _shorten(start, start_pull, less, bent, shift), 1)
        end, end_pull = start - less * length, start_pull - bent * length
        side = torch.where(is_long, end - end_pull / shift, ends[3][places])
        shortened = (end, end_pull, _residual(end, end_pull, shift), side)
        ends = [x.index_copy(0, places, y) for x, y in zip(ends, shortened, strict=True)]
        step = step.index_copy(0, places, less * length)
    return _Rows(size, *ends), step.sum(0)


class _Systems(NamedTuple):
    """The systems A_FF D_F = (A v)_F - A_FB D_B of a step, one for each row.

    Attributes:
        step: D, which is correct at the bound entries, ``(s, m)``.
        image: A D, ``(s, m)``.
        right: (A v - A D)_F, ``(s, m)``.
        free: 1 at the free entries, 0 at the others, ``(s, m)``.
        factors: Those of the preconditioner, ``(s, r, r)``.
        most_energy: t times the accepted squared error, in the metric of A, ``(s, 1)``.
        most_norm: The accepted norm of ``right``, ``(s, 1)``.
    """

    step: Tensor
    image: Tensor
    right: Tensor
    free: Tensor
    factors: Tensor
    most_energy: Tensor
    most_norm: Tensor

    def at(self, index: Tensor) -> _Systems:
        """Some of the systems."""
        return _Systems(*(x.index_select(0, index) for x in self))


def _refine(
    systems: _Systems, gramian: Tensor, model: LowRank, *, is_fixed: bool
) -> tuple[Tensor, Tensor]:
    """D and A D, from conjugate gradients."""
    step, image = systems.step, systems.image
    places = torch.arange(len(step), device=step.device)
    tiny = torch.finfo(step.dtype).tiny
    direction, before = torch.zeros_like(step), torch.ones_like(systems.most_norm)
    for _ in range(_MOST_INNER):
        right, free = systems.right, systems.free
        back = model.correct(right, systems.factors)
        corrected = torch.addcmul(right, free, back, value=-1)
        square = _dot(right, corrected)
        direction = corrected.addcmul_(square / before, direction)
        if not is_fixed:
            is_open = (square > systems.most_energy) | (_norm(right) > systems.most_norm)
            left = int(is_open.sum())
            if left <= _FEW * len(step):
                break
            if left < (1 - _ENDED) * len(right):
                step = step.index_copy(0, places, systems.step)
                image = image.index_copy(0, places, systems.image)
                index = is_open.squeeze(1).nonzero().squeeze(1)
                places, systems = places[index], systems.at(index)
                direction, square = direction[index], square[index]
        along = direction @ gramian
        bent = along * systems.free
        length = square / _dot(direction, bent).clamp(min=tiny)
        before = square.clamp(min=tiny)
        systems = systems._replace(
            step=torch.addcmul(systems.step, length, direction),
            image=torch.addcmul(systems.image, length, along),
            right=torch.addcmul(systems.right, length, bent, value=-1),
        )
    step = step.index_copy(0, places, systems.step)
    return step, image.index_copy(0, places, systems.image)


def _shorten(excess: Tensor, pull: Tensor, step: Tensor, image: Tensor, shift: float) -> Tensor:
    """The parts of steps, between 0 and 1, at which the slope changes its sign, ``(s, 1)``."""
    curved = torch.sub(image, step, alpha=shift)
    low, high = step.new_zeros(len(step), 1), step.new_ones(len(step), 1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        residual = _residual(excess - middle * step, pull - middle * image, shift)
        rises = _dot(curved, residual) < 0
        low, high = torch.where(rises, low, middle), torch.where(rises, middle, high)
    return (low + high) / 2


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """The inner product of each row, ``(s, 1)``."""
    return (x * y).sum(1, keepdim=True)


def _norm(x: Tensor) -> Tensor:
    """The norm of each row, ``(s, 1)``."""
    norm: Tensor = x.norm(dim=1, keepdim=True)
    return norm
