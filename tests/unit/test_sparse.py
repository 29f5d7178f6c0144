"""Hidden activations that are sparse: their cotangents are, too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.checks import irregular
from tests.unit.series import BATCH_DIMS, CALLS, PLACES, assert_series_is_exact

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


def masked(h: Tensor, kept: Tensor) -> Tensor:
    mask = kept.expand(h.shape).to(h).to_sparse().coalesce()
    return h.sparse_mask(mask).to_dense()


OPERATORS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "forth and back": lambda h, n: h.roll(n, 0).sin().to_sparse().to_dense(),
    "rolled": lambda h, n: h.to_sparse().to_dense().roll(n, 0),
    "compressed rows": lambda h, n: h.roll(n, 0).to_sparse_csr() @ irregular(4, 4),
    "a product": lambda h, n: torch.sparse.mm(h.relu().to_sparse(), irregular(4, 4)).roll(n, 0),
    "values": lambda h, n: h.roll(n, 0).exp().to_sparse().coalesce().values().view(4, 4),
    "a mask": lambda h, n: masked(h.roll(n, 0), torch.tensor([True, False, True, n > 0])),
    "softmax": lambda h, n: torch.sparse.softmax(h.roll(n, 0).to_sparse(), 1).to_dense(),
}


def in_matrix(operator: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """The operator on the first token of each sample."""
    return lambda h, n: operator(h[:, 0], n)


@CALLS
@BATCH_DIMS
@PLACES
@pytest.mark.parametrize("name", OPERATORS)
def test_sparse_activations(name: str, place: Any, batch_dim: Any, fused: bool) -> None:
    modules, losses_of = place(in_matrix(OPERATORS[name]), 0)
    assert_series_is_exact(losses_of, modules, [0, 1], batch_dim=batch_dim, fused=fused)
