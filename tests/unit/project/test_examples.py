"""The examples run, and compute what they say."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchjd.aggregation import ConFIG, TrimmedMean

from autogram import Engine
from autogram.testing import reference_jacobian
from examples.__main__ import NAMES
from examples.influence import find_wrong_labels, share_found, values
from examples.kernel import accuracy, kernels
from examples.physics import Network, gauss_newton, solution
from examples.problem import draw, make_model
from examples.rows import aggregate_by_parameter, config_weights
from examples.two_batches import TASKS, MultiTask, draw_losses
from tests.unit.checks import assert_close_to_reference
from tests.unit.environment import DTYPE
from tests.unit.jacobians import flat

FOLDER = Path(__file__).parents[3] / "examples"
SCRIPTS = NAMES  # those that `make examples` runs


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_short_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)  # as a user runs it
    monkeypatch.setattr("sys.argv", [name, "--short"])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert any(character.isdigit() for character in capsys.readouterr().out)


@pytest.mark.slow
def test_rows_to_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The long form trains: ConFIG and GradDrop leave a loss that is well below log(2)."""
    torch.set_default_dtype(torch.float32)  # as a user runs it
    monkeypatch.setattr("sys.argv", ["rows"])
    runpy.run_path(str(FOLDER / "rows.py"), run_name="__main__")
    drop, trimmed, config = (
        float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[1:]
    )
    assert 0 < trimmed < 1
    assert 0 < drop < 0.6
    assert 0 < config < 0.6


@pytest.fixture
def problem() -> tuple[Engine, torch.nn.Module, Tensor, Tensor]:
    """An engine, its model, losses, and their explicit rows."""
    model = make_model(5)
    engine = Engine(model)
    losses = draw(7).losses(model)
    return engine, model, losses, reference_jacobian(losses, model.parameters())


def test_products_of_two_batches() -> None:
    model = MultiTask()
    engine = Engine(model, batch_dim=None)
    losses = [draw_losses(model) for _ in range(2)]
    first, second = (engine.jacobian(x) for x in losses)
    expected = [reference_jacobian(x, model.parameters()) for x in losses]
    assert first.shape[0] == TASKS
    assert_close_to_reference(first.cross_gramian(second), expected[0] @ expected[1].T)


def test_values_predict_what_a_small_step_does(problem) -> None:
    """The difference quotient of the validation loss along each sample's gradient."""
    engine, model, losses, jacobian = problem
    validation = draw(4)
    found = values(engine, losses, validation.losses(model))
    step = 1e-4
    changes = []
    with torch.no_grad():
        start = torch.nn.utils.parameters_to_vector(model.parameters())
        for row in jacobian:
            both = []
            for sign in (1, -1):
                moved = start - sign * step * row
                torch.nn.utils.vector_to_parameters(moved, model.parameters())
                both.append(validation.losses(model).mean())
            changes.append((both[1] - both[0]) / (2 * step))
    assert (found - torch.stack(changes)).abs().max() < 1e-6 * found.abs().max()


def test_wrong_labels_have_little_value() -> None:
    _, found, _ = find_wrong_labels(100)
    assert share_found(found, wrong=12, looked_at=12) > 0.4


def test_kernels_are_products_of_the_outputs_gradients(problem) -> None:
    engine, model, _, _ = problem
    x, z = (model(draw(size).x)[:, 0] for size in (6, 3))
    rows_x, rows_z = (reference_jacobian(out, model.parameters()) for out in (x, z))
    k_xx, k_zx = kernels(engine, x, z)
    assert_close_to_reference(k_xx, rows_x @ rows_x.T)
    assert_close_to_reference(k_zx, rows_z @ rows_x.T)


def test_kernel_regression_learns() -> None:
    assert accuracy(80, width=64) > 0.85


def test_coordinates_may_come_parameter_by_parameter(problem) -> None:
    engine, _, losses, jacobian = problem
    found = flat(aggregate_by_parameter(engine.jacobian(losses), TrimmedMean(2)))
    assert_close_to_reference(found, TrimmedMean(2)(jacobian))


def test_config_needs_the_gramian_alone(problem) -> None:
    _, _, _, jacobian = problem
    weights = config_weights(jacobian @ jacobian.T)
    assert_close_to_reference(weights @ jacobian, ConFIG()(jacobian))


@pytest.mark.parametrize("size", [0.0, 1e-160, 1e-170], ids=["zeros", "tiny", "tinier"])
def test_config_of_a_sample_that_is_learnt(problem, size: float) -> None:
    """Its loss is zero, and so is its gradient; or the square of its gradient underflows."""
    _, _, _, jacobian = problem
    jacobian[2] *= size
    weights = config_weights(jacobian @ jacobian.T)
    jacobian[2] = 0
    assert_close_to_reference(weights @ jacobian, ConFIG()(jacobian))


def test_config_trains_on_where_samples_are_learnt() -> None:
    """In single precision, gradients of many samples are zero: they count for nothing."""
    torch.set_default_dtype(torch.float32)
    model = make_model(5)
    engine = Engine(model, verify="never")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():
        model[-1].weight *= 300
    learnt = 0
    for _ in range(20):
        losses = draw(16).losses(model)
        weights = engine.backward(losses, config_weights)
        optimizer.step()
        optimizer.zero_grad()
        assert weights.isfinite().all()
        learnt += int((weights == 0).sum())
    assert 20 < learnt < 300
    assert all(p.isfinite().all() for p in model.parameters())


def test_config_where_all_is_learnt() -> None:
    assert config_weights(torch.zeros(3, 3)).equal(torch.zeros(3))


def test_network_of_physics_carries_its_laplacian() -> None:
    """That of double backward passes."""
    network, points = Network(8), torch.rand(5, 2, requires_grad=True)
    values, laplacians = network(points)
    (slopes,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    expected = sum(
        torch.autograd.grad(slopes[:, i].sum(), points, retain_graph=True)[0][:, i] for i in (0, 1)
    )
    assert_close_to_reference(laplacians.detach(), expected)
    assert_close_to_reference(solution(torch.full((1, 2), 0.5)), torch.ones(1))


@pytest.mark.cpu  # where the example draws its points
@pytest.mark.skipif(torch.float64 != DTYPE, reason="rounding is larger than the error")
def test_gauss_newton_solves_the_equation() -> None:
    """To a relative error of 1e-5, at new points in each step."""
    errors = (error for _, error in gauss_newton(Network(), steps=60))
    assert any(error < 1e-5 for error in errors)
