"""Projections onto a dual cone by pivoting: exact, for few objectives.

The active set determines the solution of min v G v for v >= u: the entries of v that are at their
bounds. The other entries are free, and follow from a linear system. An entry is on the wrong side
if it is free and below its bound, or bound and G v is negative there. All such entries change sides
at once, as long as their number falls; otherwise, only the last of them changes sides, which
terminates for every positive definite G.

Júdice and Pires, A Block Principal Pivoting Algorithm for Large-Scale Strictly Monotone Linear
Complementarity Problems, 1994, doi:10.1016/0305-0548(94)90106-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The number of steps without progress in which all entries change sides, before they do so singly.
_PATIENCE = 3


def pivot(bounds: Tensor, gramian: Tensor, most: int, is_bound: Tensor) -> tuple[Tensor, int]:
    """The minima of v G v for v >= u, for each row u of the bounds.

    Args:
        bounds: ``(s, m)``.
        gramian: G, positive definite.
        most: The largest number of steps, solved or not.
        is_bound: A guess of the entries at their bounds, ``(s, m)``.

    Returns:
        v ``(s, m)``, and the number of steps.
    """
    weights = bounds.clone()
    rows = torch.arange(len(bounds), device=bounds.device)  # unsolved rows
    fewest = torch.full_like(rows, bounds.shape[1] + 1)
    patience = torch.full_like(rows, _PATIENCE)
    numbers = torch.arange(bounds.shape[1], device=bounds.device)
    # Below this, a sign is a rounding error.
    slack = torch.finfo(bounds.dtype).eps * gramian.shape[0]
    for step in range(1, most + 1):
        u = bounds[rows]
        v = _solve(u, gramian, is_bound)
        weights[rows] = v
        scale = (v.abs() @ gramian.abs()).amax(1, keepdim=True)
        pulls_away = is_bound & (v @ gramian < -slack * scale)
        is_below = ~is_bound & (v - u < -slack * v.abs().amax(1, keepdim=True))
        changing = pulls_away | is_below
        count = changing.sum(1)
        is_open = count > 0
        if not bool(is_open.any()):
            return torch.maximum(weights, bounds), step
        is_fewer = count < fewest
        fewest = torch.where(is_fewer, count, fewest)
        patience = torch.where(is_fewer, _PATIENCE, patience - 1)
        last = torch.where(changing, numbers, -1).amax(1, keepdim=True) == numbers
        changing &= last | (patience >= 0).unsqueeze(1)
        is_bound = (is_bound ^ changing)[is_open]
        rows, fewest, patience = rows[is_open], fewest[is_open], patience[is_open]
    return torch.maximum(weights, bounds), most


def _solve(u: Tensor, gramian: Tensor, is_bound: Tensor) -> Tensor:
    """The v with v = u at bound entries, and G v = 0 at free ones."""
    is_free = ~is_bound
    both = is_free.unsqueeze(2) & is_free.unsqueeze(1)
    matrix = torch.where(both, gramian, 0) + torch.diag_embed(is_bound.to(gramian.dtype))
    fixed = torch.where(is_bound, u, 0)
    right = torch.where(is_bound, u, -(fixed @ gramian))
    return torch.cholesky_solve(right.unsqueeze(2), torch.linalg.cholesky(matrix)).squeeze(2)
