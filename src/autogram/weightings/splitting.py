"""Projections onto a dual cone by operator splitting (ADMM): slow but robust.

All programs share one matrix, so an iteration for all of them is one product of (m, m)
matrices. The penalty follows the ratio of both residuals.

Boyd, Parikh, Chu, Peleato and Eckstein, Distributed Optimization and Statistical Learning via the
Alternating Direction Method of Multipliers, 2011, doi:10.1561/2200000016, sections 3.4 and 5.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_RELAXATION = 1.7
# Iterations from one check of the residuals, which waits for the device, to the next.
_CHUNK = 20
# Further steps within the free entries, from an iterate whose active set is nearly correct.
_POLISHING = 10


def split(
    bounds: Tensor,
    gramian: Tensor,
    point: Tensor,
    is_done: Callable[[Tensor], bool],
    most: int,
) -> int:
    """Iterates towards the minima of v G v for v >= u, for each row u of the bounds.

    Args:
        bounds: ``(s, m)``.
        gramian: G, positive definite.
        point: The start, ``(s, m)``.
        is_done: Called with the iterate v ``(s, m)`` after each chunk of iterations.
        most: The largest number of iterations.

    Returns:
        The number of iterations.
    """
    eye = torch.eye(len(gramian), dtype=gramian.dtype, device=gramian.device)
    z, y, penalty = point, torch.zeros_like(point), _first_penalty(gramian)
    count, is_solved = 0, False
    while count < most and not is_solved:
        factor = torch.linalg.cholesky_ex(gramian + penalty * eye).L
        inverse = penalty * torch.cholesky_inverse(factor)
        for _ in range(_CHUNK):
            before = z
            x = torch.addmm(z, z - y, inverse, beta=1 - _RELAXATION, alpha=_RELAXATION)
            total = x + y
            z = torch.maximum(total, bounds)
            y = total - z
        count += _CHUNK
        is_solved = is_done(z)
        ratio = (x - z).norm() / (z - before).norm().clamp(min=torch.finfo(z.dtype).tiny)
        change = torch.where((ratio > 5) | (ratio < 0.2), ratio.clamp(0.01, 100).sqrt(), 1.0)
        # If the primal residual is larger, a larger penalty reduces it.
        y, penalty = y / change, penalty * change
    return count


def _first_penalty(gramian: Tensor) -> Tensor:
    """A penalty between the largest eigenvalue of G and a guess of the least."""
    vector = torch.ones_like(gramian[0])
    for _ in range(8):
        vector = gramian @ vector
        vector = vector / vector.norm()
    largest = (gramian @ vector).norm()
    penalty: Tensor = (largest * gramian.diagonal().amin()).sqrt() / len(gramian) ** 0.5
    return penalty


def polish(bounds: Tensor, gramian: Tensor, point: Tensor) -> Tensor:
    """Conjugate gradients in the free entries.

    A row that would cross its bounds is unchanged.
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
