"""Steps of Gauss and Newton in the space of samples, against dense ones in that of parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import (
    Engine,
    InvalidLossesError,
    InvalidOperandError,
    InvalidOptionError,
    NonFiniteError,
    NotConnectedError,
    UnsupportedError,
)
from autogram.optim import GaussNewton
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference

Closure = Callable[[], Tensor]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def residuals_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = model(x).squeeze(1) - y
    return found


def draw(size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 2)
    return x, (2 * x[:, 0]).sin() + x[:, 1].square()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def dense_step(model: nn.Module, closure: Closure, damping: float) -> tuple[float, int]:
    """A step by dense least squares in the parameters: the next damping, and how many were tried.

    As Levenberg and Marquardt have it: the damping rises until the residuals become smaller.
    """
    residuals = closure()
    jacobian = reference_jacobian(residuals, model.parameters())
    residuals, before = residuals.detach(), flat(model)
    loss, eye = residuals.square().sum(), torch.eye(len(before))
    unit = jacobian.square().sum(1).mean()
    for trial in range(60):
        rows = torch.cat([jacobian, (damping * unit).sqrt() * eye])
        right = torch.cat([residuals, torch.zeros(len(before))]).unsqueeze(1)
        step = torch.linalg.lstsq(rows, right).solution.squeeze(1)
        nn.utils.vector_to_parameters(before - step, model.parameters())
        predicted = loss - (residuals - jacobian @ step).square().sum()
        if (loss - closure().detach().square().sum()) / predicted >= 0.01:
            return damping / 100, trial + 1
        damping *= 2
    raise AssertionError("no step helps")


@pytest.mark.parametrize("sizes", [(6, 8), (20, 24)], ids=["few residuals", "many"])
@pytest.mark.parametrize("damping", [1e-3, 1e-1])
def test_steps_are_those_of_levenberg_and_marquardt(damping: float, sizes: tuple[int, int]) -> None:
    """Over a series, in which each step has other points and every second one another size."""
    model, twin = make_model(), make_model()
    optimizer = GaussNewton(Engine(model), damping=damping)
    tried = []
    for i in range(12):
        points = draw(sizes[i % 2])
        twin.load_state_dict(model.state_dict())
        before = residuals_of(twin, *points)
        found = optimizer.step(partial(residuals_of, model, *points))
        assert_close_to_reference(found, before.detach())
        damping, trials = dense_step(twin, partial(residuals_of, twin, *points), damping)
        tried.append(trials)
        assert_close_to_reference(flat(model), flat(twin))
        assert abs(optimizer.param_groups[0]["damping"] / damping - 1) < 1e-9
        assert residuals_of(model, *points).square().sum() < before.square().sum()
    assert min(tried) < max(tried)


def test_the_damping_rises_until_a_step_helps() -> None:
    """One that is much too small, where the full step is much too long."""
    x = torch.full((1,), 3.0)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    optimizer = GaussNewton(Engine(model), damping=1e-12)
    before = optimizer.step(lambda: model(x).atan())
    assert model(x).atan().abs() < before.abs()
    assert 1e-4 < optimizer.param_groups[0]["damping"] < 1


def test_state_dict_round_trip(tmp_path: Any) -> None:
    """A run that is stopped and resumed goes on as one that is not."""
    model, other = make_model(), make_model()
    points = [draw(10) for _ in range(8)]
    optimizer = GaussNewton(Engine(model), damping=1e-1)
    for each in points[:4]:
        optimizer.step(partial(residuals_of, model, *each))
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    assert optimizer.param_groups[0]["damping"] != 1e-1
    resumed = GaussNewton(Engine(other))
    of_model, of_optimizer = torch.load(tmp_path / "state.pt")
    other.load_state_dict(of_model)
    resumed.load_state_dict(of_optimizer)
    assert resumed.param_groups[0]["damping"] == optimizer.param_groups[0]["damping"]
    for each in points[4:]:
        optimizer.step(partial(residuals_of, model, *each))
        resumed.step(partial(residuals_of, other, *each))
    assert torch.equal(flat(model), flat(other))
    assert resumed.state_dict() == optimizer.state_dict()
    assert of_optimizer["param_groups"][0]["param_names"] == [
        n for n, _ in model.named_parameters()
    ]


def test_an_overparametrised_network_is_solved() -> None:
    """All residuals become zero, in the end with the speed of Newton's method."""
    model, points = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)), draw(20)
    optimizer = GaussNewton(Engine(model, batch_dim=0))
    closure = partial(residuals_of, model, *points)
    norms = [float(optimizer.step(closure).norm()) for _ in range(12)]
    assert norms[-1] < 1e-10 * norms[0]


def test_where_the_gradient_is_zero_nothing_changes() -> None:
    """At a solution, and where the residuals depend on nothing."""
    model, (x, y) = make_model(), draw(5)
    y = model(x).squeeze(1).detach()
    optimizer, before, calls = GaussNewton(Engine(model)), flat(model), []

    def closure(factor: float) -> Tensor:
        calls.append(factor)
        return factor * residuals_of(model, x, y) + 1 - factor

    for factor in (1.0, 0.0):
        optimizer.step(partial(closure, factor))
        assert torch.equal(flat(model), before)
    assert calls == [1.0, 0.0]
    assert optimizer.param_groups[0]["damping"] == 1e-3


def test_where_no_step_helps_nothing_changes() -> None:
    """The trials end, as where gradients have the wrong sign."""
    model, (x, y) = nn.Linear(2, 1), draw(5)
    optimizer, before, calls = GaussNewton(Engine(model, verify="never")), flat(model), []

    def closure() -> Tensor:
        calls.append(None)
        found = residuals_of(model, x, y)
        return (2 * found).detach() - found

    optimizer.step(closure)
    assert torch.equal(flat(model), before)
    assert 40 < len(calls) <= 61


def test_without_residuals() -> None:
    model = make_model()
    before = flat(model)
    assert GaussNewton(Engine(model)).step(lambda: model(torch.zeros(0, 2)).squeeze(1)).shape == (
        0,
    )
    assert torch.equal(flat(model), before)


def test_several_residuals_for_each_sample() -> None:
    """Of any shape, in which the residuals are returned."""
    model, x = nn.Linear(2, 3), torch.randn(4, 2)
    y = x @ torch.randn(2, 3) + 1
    optimizer = GaussNewton(Engine(model))
    for _ in range(3):
        assert optimizer.step(lambda: model(x) - y).shape == (4, 3)
    assert float((model(x) - y).detach().norm()) < 1e-6


def test_derivatives_of_the_network() -> None:
    """A closure may differentiate, also where a length is only tried: u' = u, u(0) = 1."""
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = GaussNewton(Engine(model, batch_dim=None))
    x = torch.linspace(0, 1, 12).unsqueeze(1).requires_grad_()

    def closure() -> Tensor:
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return torch.cat([(slope - u).squeeze(1), u[0] - 1])

    for _ in range(30):
        optimizer.step(closure)
    assert (model(x) - x.exp()).abs().max() < 1e-4


def test_frozen_parameters_stay() -> None:
    model, points = make_model(), draw(6)
    model[0].weight.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = GaussNewton(Engine(model))
    optimizer.step(partial(residuals_of, model, *points))
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert changed == [False, True, True, True]
    assert all(p.grad is None for p in model.parameters())


def test_in_single_precision() -> None:
    model, (x, y) = make_model().float(), draw(8)
    optimizer = GaussNewton(Engine(model))
    closure = partial(residuals_of, model, x.float(), y.float())
    norms = [optimizer.step(closure).norm() for _ in range(25)]
    assert {norm.dtype for norm in norms} == {torch.float32}
    assert norms[-1] < 0.1 * norms[0]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_an_error_in_the_closure_changes_nothing(number: int) -> None:
    """In the first call, and where a length is tried. The next step is right."""
    model, twin, points = make_model(), make_model(), draw(6)
    twin.load_state_dict(model.state_dict())
    optimizer = GaussNewton(Engine(model), damping=1e-3)
    storages = [p.data_ptr() for p in model.parameters()]
    before, calls = flat(model), 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return 5 * residuals_of(model, *points).sinh()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert torch.equal(flat(model), before)
    damping = optimizer.param_groups[0]["damping"]
    optimizer.step(closure)
    dense_step(twin, lambda: 5 * residuals_of(twin, *points).sinh(), damping)
    assert_close_to_reference(flat(model), flat(twin))
    assert [p.data_ptr() for p in model.parameters()] == storages


def test_hooks_of_optimizers_run() -> None:
    model, points, seen = make_model(), draw(6), []
    optimizer = GaussNewton(Engine(model))
    optimizer.register_step_post_hook(lambda *_: seen.append(None))
    optimizer.step(partial(residuals_of, model, *points))
    assert seen == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "`damping` is 0.0. Pass a positive number"),
        ({"damping": float("nan")}, "`damping` is nan. Pass a positive number"),
        ({"damping": True}, "`damping` is True. Pass a positive number"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        GaussNewton(Engine(make_model()), **options)


def test_mistakes() -> None:
    model, points = make_model(), draw(6)
    with pytest.raises(InvalidOperandError, match=r"A Sequential was given.*GaussNewton\(Engine"):
        GaussNewton(model)  # type: ignore[arg-type]
    optimizer = GaussNewton(Engine(model))
    with pytest.raises(InvalidLossesError, match=r"returned a float.*Return the residuals as one"):
        optimizer.step(lambda: 1.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidLossesError, match="do not require a gradient"):
        optimizer.step(lambda: residuals_of(model, *points).detach())
    with pytest.raises(NotConnectedError):
        optimizer.step(lambda: torch.ones(3, requires_grad=True) * 2)
    with pytest.raises(NonFiniteError, match="The closure returned residuals that are infinite"):
        optimizer.step(lambda: residuals_of(model, *points) / torch.tensor([0.0] + 5 * [1.0]))
    model.append(nn.Linear(1, 1))
    with pytest.raises(UnsupportedError, match=r"depend on `3.weight`.*Make the optimizer anew"):
        optimizer.step(partial(residuals_of, model, *points))
