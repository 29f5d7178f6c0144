"""A preconditioner for Newton's method: A is approximated by L L' + t I, where L has few columns.

With an orthonormal basis Q near the largest eigenvectors of A, found by subspace iteration,
Nyström's approximation of A is (A Q) (Q' A Q)^-1 (A Q)' = L L'. The rest of A counts as t I. A
system contains only the free entries F of its row, and Woodbury's identity inverts its block,

    (L_F L_F' + t I)^-1 = (I - L_F (t I + L_F' L_F)^-1 L_F') / t,

with one (r, r) system for each row. One product gives all matrices L_F' L_F: the masks F times the
products of each two columns of L.

Frangella, Tropp and Udell, Randomized Nyström Preconditioning, 2023, doi:10.1137/21M1466244.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SUBSPACE_ITERATIONS = 2


class LowRank:
    """L L' + t I near A, and the inverses of its blocks at the free entries.

    Args:
        gramian: A, ``(m, m)``.
        shift: d.
    """

    def __init__(self, gramian: Tensor, shift: float) -> None:
        m = len(gramian)
        rank = min(m, max(8, round(1.5 * m**0.5 / 8) * 8))
        # Unstructured columns, the same in each call.
        numbers = torch.arange(m * rank, dtype=torch.float64, device=gramian.device)
        basis = ((numbers * 0.6180339887).frac() - 0.5).view(m, rank).to(gramian.dtype)
        for _ in range(_SUBSPACE_ITERATIONS):
            basis = torch.linalg.qr(gramian @ basis).Q
        image = gramian @ basis
        core = basis.mT @ image
        core.diagonal().add_(1e-6 * core.diagonal().sum())
        factor = torch.linalg.cholesky_ex((core + core.mT) / 2).L
        self._columns = torch.linalg.solve_triangular(factor, image.mT, upper=False).mT
        rest = gramian.diagonal().sum() - self._columns.square().sum()
        self.level = (rest / m).clamp(min=shift)  # t
        # Products of two columns, and the place of each in an (r, r) matrix.
        i, j = torch.tril_indices(rank, rank, device=gramian.device)
        self._pairs = self._columns[:, i] * self._columns[:, j]
        self._places = torch.empty(rank, rank, dtype=torch.long, device=gramian.device)
        self._places[i, j] = self._places[j, i] = torch.arange(len(i), device=gramian.device)

    def factors(self, free: Tensor) -> Tensor:
        """Cholesky factors of t I + L_F' L_F, ``(s, r, r)``."""
        inner = (free @ self._pairs).index_select(1, self._places.flatten())
        inner = inner.view(-1, *self._places.shape)
        inner.diagonal(dim1=1, dim2=2).add_(self.level)
        factors: Tensor = torch.linalg.cholesky_ex(inner).L
        return factors

    def correct(self, right: Tensor, factors: Tensor) -> Tensor:
        """L (t I + L_F' L_F)^-1 L' x for each row x, ``(s, m)``."""
        inner = torch.cholesky_solve((right @ self._columns).unsqueeze(2), factors)
        corrected: Tensor = inner.squeeze(2) @ self._columns.mT
        return corrected
