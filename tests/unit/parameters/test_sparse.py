"""Hidden activations and weights that are sparse: their cotangents are, too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, UnsupportedError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, assert_gramian_is_exact, irregular
from tests.unit.engines import per_sample
from tests.unit.networks import Call
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


INPUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: nn.functional.linear(x, w.t()),
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "scaled": lambda x, w: x @ (w * 2),
    "normed": lambda x, w: torch.sparse.mm(x, w / w.norm(dim=0)),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_inputs(layout: torch.layout, name: str) -> None:
    """As bags of words are."""
    words = irregular(5, 4) * (irregular(5, 4) > 0)
    model = Call(lambda x, w: INPUTS[name](x.to_sparse(layout=layout), w), (4, 3))
    assert_gramian_is_exact(lambda: model, words)
    losses = per_sample(Call.forward(model, words))
    given = Call(INPUTS[name], (4, 3))
    given.load_state_dict(model.state_dict())
    engine = Engine(given)
    for _ in range(2):
        gramian = engine.compute_gramian(per_sample(given(words.to_sparse(layout=layout))))
        jacobian = reference_jacobian(losses, model.parameters())
        assert_close_to_reference(gramian, jacobian @ jacobian.T)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_parameters_are_refused(layout: torch.layout) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(irregular(4, 3).to_sparse(layout=layout))
    model.forward = lambda x: (model.weight.t() @ x.T).T  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"`weight` is sparse.*sparse_coo_tensor"):
        Engine(model).compute_gramian(per_sample(model(irregular(5, 4))))


def edges(w: Tensor) -> Tensor:
    """Weights of the edges of a graph, as a matrix."""
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]]), w, (4, 4), check_invariants=True
    )


WEIGHTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "edges": (lambda x, w: torch.sparse.mm(edges(w), x.T).T, (4,)),
    "edges from the right": (lambda x, w: x @ edges(w).to_dense(), (4,)),
    "edges and a sum": (lambda x, w: torch.sparse.addmm(x.T, edges(w), x.T, beta=0.5).T, (4,)),
    "pruned": (lambda x, w: torch.sparse.mm((w * (w > 0)).to_sparse(), x.T).T, (4, 4)),
    "compressed rows": (lambda x, w: (w.to_sparse_csr() @ x.T).T, (4, 4)),
    "linear": (lambda x, w: nn.functional.linear(x, w.to_sparse()), (4, 4)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_sparse_weights(name: str) -> None:
    """Sparse tensors that are computed from parameters have no views."""
    function, shape = WEIGHTS[name]

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), Call(function, shape), nn.Tanh(), nn.Linear(4, 2))

    assert_gramian_is_exact(make_model, torch.randn(3, 3))
