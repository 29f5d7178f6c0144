"""Self-influence from the Gramian, against dense systems of the parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, InvalidOperandError, NonFiniteError
from autogram.attribution import self_influence
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import batch, mlp, per_sample


def dense(rows: Tensor, damping: float) -> Tensor:
    """The same by a system of the parameters, ``(n, n)``, in double precision."""
    rows = rows.double()
    matrix = rows.T @ rows + damping * torch.eye(rows.shape[1], dtype=rows.dtype)
    inverse = torch.linalg.pinv(matrix, hermitian=True) if damping == 0 else matrix.inverse()
    return ((rows @ inverse) * rows).sum(1)


@pytest.mark.parametrize("damping", [1e-3, 1.0, torch.tensor(10.0), 1e6])
@pytest.mark.parametrize("samples", [1, 6, 50])
def test_it_is_that_of_a_system_of_the_parameters(samples: int, damping: Any) -> None:
    """Of more and of fewer samples than parameters."""
    model = mlp()
    losses = per_sample(model(batch(samples, 3)))
    rows = reference_jacobian(losses, model.parameters())
    found = self_influence(Engine(model).compute_gramian(losses), damping)
    assert_close_to_reference(found, dense(rows, float(damping)))
    assert found.min() > 0
    assert found.max() < 1


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)], ids=str)
def test_leverage_scores_without_damping(shape: tuple[int, int]) -> None:
    """They add up to the rank, also where several gradients are equal, or zero."""
    rows = torch.randn(shape, dtype=torch.float64)
    rows = torch.cat([rows, rows[:2], 0 * rows[:1]])
    found = self_influence(rows @ rows.T, 0.0)
    assert_close_to_reference(found, dense(rows, 0.0))
    assert abs(float(found.sum()) - 4) < 1e-9
    assert found[-1] == 0


@pytest.mark.parametrize("damping", [0.0, 1e-12, 1e-3])
def test_rounding_of_the_gramian_counts_for_nothing(damping: float) -> None:
    """In float32, a Gramian of rank three has other eigenvalues that are not zero."""
    rows = (torch.randn(40, 3) * torch.tensor([1e2, 1.0, 1.0])).float()
    found = self_influence(rows @ rows.T, damping)
    assert found.dtype == torch.float32
    assert float((found - dense(rows, damping)).abs().max()) < 2e-2


def test_a_wrong_label_has_a_large_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    y = (x[:, 0] > 0).long()
    y[7] = 1 - y[7]
    x[7, 0] = 1.5 * x[7, 0].sign()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100)
    criterion = nn.CrossEntropyLoss(reduction="none")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    gramian = Engine(model).compute_gramian(criterion(model(x), y))
    assert int(self_influence(gramian, 1e-2).argmax()) == 7


@pytest.mark.parametrize("damping", [-1.0, torch.nan, "1", torch.ones(2), None], ids=str)
def test_a_damping_that_is_none(damping: Any) -> None:
    with pytest.raises(InvalidOperandError, match=r"The damping is .*Pass zero, or a positive"):
        self_influence(torch.eye(2), damping)


def test_no_gramian() -> None:
    with pytest.raises(InvalidOperandError, match=r"has shape \(3,\)\. Pass a square matrix"):
        self_influence(torch.ones(3), 1.0)
    with pytest.raises(NonFiniteError, match="not a number, so self-influence"):
        self_influence(torch.eye(2) * torch.nan, 1.0)


def test_of_nothing() -> None:
    assert self_influence(torch.zeros(0, 0), 1.0).shape == (0,)
    assert self_influence(torch.zeros(3, 3), 0.0).tolist() == [0.0] * 3
