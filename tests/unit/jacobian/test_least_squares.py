"""Steps of least squares: by the system of the objectives, compared with dense ones."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from autogram import Engine, InvalidOperandError, NonFiniteError
from autogram.testing import reference_jacobian


def make(size: int, outputs: int = 1) -> tuple[nn.Module, Tensor]:
    """A model, and residuals ``(size,)`` or ``(size, outputs)``."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs))
    residuals = model(torch.randn(size, 2)) - torch.randn(size, outputs)
    return model, residuals.squeeze(1) if outputs == 1 else residuals


def flat(step: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in step.values()])


@pytest.mark.parametrize("damping", [0.0, 1e-6, 0.1, 10.0])
@pytest.mark.parametrize(("size", "outputs"), [(5, 1), (3, 2), (40, 1)])
def test_steps_are_those_of_dense_least_squares(size: int, outputs: int, damping: float) -> None:
    """Of fewer residuals than parameters, and of more, where J Jᵀ is singular."""
    model, residuals = make(size, outputs)
    found = flat(Engine(model).jacobian(residuals).least_squares(residuals, damping=damping))
    jacobian = reference_jacobian(residuals, model.parameters())
    n = jacobian.shape[1]
    rows = torch.cat([jacobian, damping**0.5 * torch.eye(n)])
    right = torch.cat([residuals.detach().flatten(), torch.zeros(n)])
    expected = torch.linalg.lstsq(rows, right.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_linear_model_is_solved_by_one_step() -> None:
    """Its residuals are those of their linearisation."""
    model = nn.Linear(3, 1)
    x, y = torch.randn(4, 3), torch.randn(4)

    def residuals() -> Tensor:
        return model(x).squeeze(1) - y

    engine = Engine(model)
    step = engine.jacobian(residuals()).least_squares(residuals())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= step[name]
    assert_close(residuals(), torch.zeros(4))


def test_zero_gradients() -> None:
    """There is nowhere to go."""
    model, residuals = make(4)
    step = Engine(model).jacobian(0 * residuals).least_squares(residuals)
    assert_close(flat(step), torch.zeros_like(flat(step)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_residuals_of_another_dtype(dtype: torch.dtype, damping: float) -> None:
    """Nothing is rounded to it."""
    model, residuals = make(4)
    jacobian = Engine(model).jacobian(residuals)
    right = torch.tensor([3.0, 0.0, 1.0, -2.0]).to(dtype)
    found = jacobian.least_squares(right, damping=damping)
    expected = jacobian.least_squares(right.double(), damping=damping)
    assert_close(flat(found), flat(expected))


def test_mistakes() -> None:
    model, residuals = make(4)
    jacobian = Engine(model).jacobian(residuals)
    with pytest.raises(InvalidOperandError, match="The damping is -1"):
        jacobian.least_squares(residuals, damping=-1)
    with pytest.raises(InvalidOperandError, match="Pass zero, or a positive number"):
        jacobian.least_squares(residuals, damping=float("nan"))
    with pytest.raises(InvalidOperandError, match="The damping is None"):
        jacobian.least_squares(residuals, damping=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidOperandError, match="shape"):
        jacobian.least_squares(torch.ones(3))
    with pytest.raises(InvalidOperandError, match="Stacks of vectors are for `vjp`"):
        jacobian.least_squares(torch.ones(2, 4))
    with pytest.raises(NonFiniteError, match="system of the residuals"):
        jacobian.least_squares(torch.full((4,), torch.nan))
