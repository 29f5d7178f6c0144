"""Weights of PCGrad and GradVac: those of torchjd, for the same orders."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torchjd.aggregation import GradVacWeighting, PCGradWeighting

from autogram import InvalidOperandError, InvalidOptionError, NonFiniteError
from autogram.weightings import GradVac, PCGrad, surgery

SIZES = [1, 2, 5, 30]


def make_gramian(m: int, *, some_zero: bool = False) -> Tensor:
    """Of gradients that conflict."""
    rows = torch.randn(m, m // 2 + 1)
    if some_zero:
        rows[::3] = 0
    return rows @ rows.T


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that torchjd, which draws row after row, and autogram both get."""
    drawn: list[Tensor] = []
    randperm = torch.randperm

    def draw(gramian: Tensor) -> Tensor:
        m = len(gramian)
        for i in range(m):
            order = randperm(m)
            drawn.append(order[order != i])
        return torch.stack(drawn[-m:])

    def hand_out(n: int) -> Tensor:
        """All m for PCGrad, with the row itself, and places among the others for GradVac."""
        i, others = hand_out.row, drawn[hand_out.row]
        hand_out.row += 1
        if n == len(others) + 1:
            return torch.cat([others, torch.tensor([i % n])])
        return others - (others > i % (n + 1)).long()

    hand_out.row = 0
    monkeypatch.setattr(surgery, "_orders", draw)
    monkeypatch.setattr(torch, "randperm", hand_out)


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("some_zero", [False, True])
def test_pcgrad_is_that_of_torchjd(m: int, some_zero: bool) -> None:
    for _ in range(2):
        gramian = make_gramian(m, some_zero=some_zero)
        found = PCGrad()(gramian)
        assert_close(found, PCGradWeighting()(gramian))


@pytest.mark.cpu
@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("some_zero", [False, True])
def test_gradvac_is_that_of_torchjd(m: int, some_zero: bool) -> None:
    """In several steps, between which it remembers cosines."""
    ours, theirs = GradVac(beta=0.3), GradVacWeighting(beta=0.3)
    for _ in range(4):
        gramian = make_gramian(m, some_zero=some_zero)
        found = ours(gramian)
        assert_close(found, theirs(gramian), rtol=1e-6, atol=1e-8)


def test_gradvac_forgets() -> None:
    """On request, and when the number of objectives changes."""
    near, apart, other = torch.eye(2) + 1, torch.eye(2) + 0.1, torch.eye(3)
    first = GradVac()(apart)  # one order alone is possible
    weighting = GradVac()

    def after_near() -> Tensor:
        weighting(near)
        return weighting(apart)

    assert bool((after_near() > first).all())
    weighting.reset()
    assert_close(weighting(apart), first)
    assert bool((after_near() > first).all())
    weighting(other)
    assert_close(weighting(apart), first)


def test_each_gradient_meets_each_other_once() -> None:
    """In an order of its own."""
    found = surgery._orders(torch.eye(20))
    for i, row in enumerate(found):
        assert sorted(row.tolist()) == [j for j in range(20) if j != i]
    assert len({tuple(row.tolist()) for row in found}) == 20


@pytest.mark.parametrize("weighting", [PCGrad(), GradVac()])
def test_what_is_no_gramian_is_refused(weighting: PCGrad | GradVac) -> None:
    with pytest.raises(InvalidOperandError, match="Pass a square matrix"):
        weighting(torch.ones(2, 3))
    with pytest.raises(InvalidOperandError, match="The matrix is not a Gramian"):
        weighting(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    with pytest.raises(NonFiniteError, match="infinite or not a number"):
        weighting(torch.full((2, 2), torch.nan))
    assert weighting(torch.zeros(0, 0)).shape == (0,)
    assert_close(weighting(torch.zeros(2, 2)), torch.ones(2))


def test_options_are_checked() -> None:
    with pytest.raises(InvalidOptionError, match="`beta` is 2"):
        GradVac(beta=2)
    with pytest.raises(InvalidOptionError, match="`eps` is -1"):
        GradVac(eps=-1)
