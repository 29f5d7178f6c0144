"""What weights add up to, and UPGrad of a part of the rows."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from autogram import InvalidOptionError
from autogram.weightings import DualProj, GradVac, PCGrad, Projector, UPGrad
from tests.unit.environment import DEVICE

Make = Callable[..., Callable[[Tensor], Tensor]]


def jacobian(m: int, *, shift: float = 0.0) -> Tensor:
    """Rows that conflict."""
    return torch.randn(m, m // 2 + 1) + shift


@pytest.mark.parametrize("make", [UPGrad, DualProj, PCGrad, GradVac])
@pytest.mark.parametrize("m", [1, 5, 60])
def test_mean_weights_add_up_to_one(make: Make, m: int) -> None:
    """They are otherwise those of the method."""
    rows = jacobian(m)
    gramian = rows @ rows.T
    torch.manual_seed(0)  # orders of surgery
    weights = make(scale="mean")(gramian)
    torch.manual_seed(0)
    expected = make()(gramian)
    assert_close(weights.sum(), torch.tensor(1.0))
    assert_close(weights, expected / expected.sum())


@pytest.mark.parametrize("make", [UPGrad, DualProj, PCGrad, GradVac])
def test_mean_weights_without_conflict_are_those_of_the_mean(make: Make) -> None:
    assert_close(make(scale="mean")(torch.eye(4)), torch.full((4,), 0.25))


def test_weights_that_add_up_to_nothing_stay() -> None:
    weights = UPGrad(torch.zeros(3), scale="mean")(torch.eye(3))
    assert_close(weights, torch.zeros(3))


@pytest.mark.parametrize("samples", [1, 3, 20, 59])
def test_steps_of_samples_conflict_with_no_gradient(samples: int) -> None:
    """In each of many calls, up to the regularisation and the tolerance."""
    rows = jacobian(60, shift=0.1)
    rows = rows / rows.norm(dim=1, keepdim=True)
    gramian = rows @ rows.T
    weighting = UPGrad(projector=Projector(tolerance=1e-6), samples=samples)
    assert float((gramian @ torch.full((60,), 1 / 60)).min()) < -1e-2  # the mean conflicts
    for _ in range(10):
        weights = weighting(gramian)
        allowed = 1e-4 * gramian.trace() * weights + 1e-5 * weights.norm()
        assert bool((gramian @ weights >= -allowed).all())


def test_expectation_and_variance_of_samples() -> None:
    """Over many calls: the weights of all rows, and the variance that is documented."""
    m, samples, calls = 24, 4, 500
    rows = jacobian(m)
    gramian = rows @ rows.T
    weighting = UPGrad(samples=samples)
    drawn = torch.stack([weighting(gramian) for _ in range(calls)])
    each = Projector()(torch.eye(m) / m, gramian)  # (m, m)
    w = each.sum(0)
    spread = (each - w / m).square().sum() / (m - 1)
    variance = float(m**2 / samples * (1 - samples / m) * spread)
    assert float((drawn.mean(0) - w).square().sum()) < 4 * variance / calls
    assert float((drawn - w).square().sum(1).mean()) == pytest.approx(variance, rel=0.15)


def test_all_samples_are_all_rows() -> None:
    """Also where there are fewer rows than samples."""
    rows = jacobian(10)
    for samples in (10, 11):
        weighting = UPGrad(samples=samples)
        assert_close(weighting(rows @ rows.T), UPGrad()(rows @ rows.T))


def test_samples_have_a_generator_of_their_own() -> None:
    """It leaves PyTorch's alone, depends on the seed, and goes with a copy."""
    rows = jacobian(30)
    gramian = rows @ rows.T
    state = torch.get_rng_state()
    first, second, other = UPGrad(samples=3), UPGrad(samples=3), UPGrad(samples=3, seed=1)
    weights = [first(gramian) for _ in range(3)]
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(weights[0], weights[1])
    assert_close([second(gramian) for _ in range(2)], weights[:2])
    assert_close(copy.deepcopy(second)(gramian), weights[2])
    assert not torch.equal(other(gramian), weights[0])


def test_preferences_go_with_samples() -> None:
    """The projected rows have theirs."""
    preferences = torch.tensor([0.0, 0.0, 1.0])
    weighting = UPGrad(preferences, samples=1)
    found = {tuple(weighting(torch.eye(3)).tolist()) for _ in range(20)}
    assert found == {(0.0, 0.0, 0.0), (0.0, 0.0, 3.0)}


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: UPGrad(scale="sum"), 'Pass "method" or "mean"'),  # type: ignore[arg-type]
    (lambda: PCGrad(scale="sum"), "`scale` is 'sum'"),  # type: ignore[arg-type]
    (lambda: GradVac(scale="sum"), "`scale` is 'sum'"),  # type: ignore[arg-type]
    (lambda: UPGrad(samples=0), "`samples` is 0. Pass a positive integer, or `None`"),
    (
        lambda: UPGrad(projector=Projector(iterations=10), samples=2),
        "the same samples in each replay. Leave out one of them",
    ),
]


@pytest.mark.parametrize(("act", "message"), MISTAKES)
def test_mistakes(act: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        act()


def test_samples_on_the_device_of_the_gramian() -> None:
    rows = jacobian(12)
    assert UPGrad(samples=2)(rows @ rows.T).device.type == torch.device(DEVICE).type
