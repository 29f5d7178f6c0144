"""Projections onto a dual cone by operator splitting (ADMM): for many objectives.

All programs share one matrix, so that an iteration for all of them is one product of (m, m)
matrices. The penalty follows the ratio of both residuals.

Boyd, Parikh, Chu, Peleato and Eckstein, Distributed Optimization and Statistical Learning via the
Alternating Direction Method of Multipliers, 2011, doi:10.1561/2200000016, sections 3.4 and 5.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_RELAXATION = 1.7
# Iterations from one check of the residuals, which waits for the device, to the next.
_CHUNK = 20
# Further steps inside of the free entries, from an iterate whose active set is about right.
_POLISHING = 10


class State(NamedTuple):
    """The state between two iterations.

    Attributes:
        point: v, ``(s, m)``, not below the bounds.
        dual: The scaled multipliers, ``(s, m)``.
        penalty: The scale of the multipliers, a tensor without dimensions.
    """

    point: Tensor
    dual: Tensor
    penalty: Tensor

    def to(self, dtype: torch.dtype) -> State:
        """The state in another dtype."""
        return State(*(x.to(dtype) for x in self))


def first_state(bounds: Tensor, gramian: Tensor) -> State:
    """The bounds, and a penalty between the largest eigenvalue of G and a guess of the least."""
    vector = torch.ones_like(gramian[0])
    for _ in range(8):
        vector = gramian @ vector
        vector = vector / vector.norm()
    largest = (gramian @ vector).norm()
    penalty = (largest * gramian.diagonal().amin()).sqrt() / len(gramian) ** 0.5
    return State(bounds.clamp(min=0), torch.zeros_like(bounds), penalty)


def split(
    bounds: Tensor,
    gramian: Tensor,
    state: State,
    is_done: Callable[[State], bool] | None,
    most: int,
) -> tuple[State, int]:
    """Iterates towards the minima of v G v for v >= u, for each row u of the bounds.

    Args:
        bounds: ``(s, m)``.
        gramian: G, positive definite.
        state: Where to start.
        is_done: Asked before each chunk of iterations; without it, all iterations are made.
        most: The number of iterations after which to stop.

    Returns:
        The state, and the number of iterations.
    """
    eye = torch.eye(len(gramian), dtype=gramian.dtype, device=gramian.device)
    count = 0
    while count < most and not (is_done is not None and is_done(state)):
        z, y, penalty = state
        factor = torch.linalg.cholesky_ex(gramian + penalty * eye).L
        inverse = penalty * torch.cholesky_inverse(factor)
        for _ in range(_CHUNK):
            before = z
            x = torch.addmm(z, z - y, inverse, beta=1 - _RELAXATION, alpha=_RELAXATION)
            total = x + y
            z = torch.maximum(total, bounds)
            y = total - z
        count += _CHUNK
        ratio = (x - z).norm() / (z - before).norm().clamp(min=torch.finfo(z.dtype).tiny)
        change = torch.where((ratio > 5) | (ratio < 0.2), ratio.clamp(0.01, 100).sqrt(), 1.0)
        # Where the primal residual is larger, a larger penalty brings it down.
        state = State(z, y / change, penalty * change)
    return state, count


def polish(bounds: Tensor, gramian: Tensor, point: Tensor) -> Tensor:
    """Conjugate gradients in the free entries, as far as no bound is crossed.

    A row that would leave its bounds stays as it was.
    """
    is_free = point > bounds
    v = point
    residual = torch.where(is_free, -(v @ gramian), 0)
    direction = residual
    square = residual.square().sum(1, keepdim=True)
    tiny = torch.finfo(v.dtype).tiny
    for _ in range(_POLISHING):
        image = torch.where(is_free, direction @ gramian, 0)
        length = square / (direction * image).sum(1, keepdim=True).clamp(min=tiny)
        v = v + length * direction
        residual = residual - length * image
        before, square = square, residual.square().sum(1, keepdim=True)
        direction = residual + square / before.clamp(min=tiny) * direction
    stays = (v < bounds).any(1, keepdim=True) | ~v.isfinite().all(1, keepdim=True)
    return torch.where(stays, point, v)
