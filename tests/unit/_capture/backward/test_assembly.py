"""Uses that wait for one another until some are taken in together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._capture.backward import assembly
from autogram._capture.backward.assembly import Assembly
from tests.unit._capture.seen import seen_uses
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, batch, mlp, per_sample

SIZES = pytest.mark.parametrize(
    ("large", "full"),
    [
        pytest.param(2**17, 2**20, id="all wait"),
        pytest.param(20, 2**20, id="some are large"),
        pytest.param(2**17, 20, id="there is room for few"),
        pytest.param(0, 0, id="none waits"),
    ],
)


class Mixed(nn.Module):
    """Uses of several sizes, of which one has no rule, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(3, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.rand(2) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(self.first(x).tanh())
        return torch.hypot(self.last(self.shared(y).tanh()), self.scale)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many uses wait at the end of each pass."""
    counts = []
    complete = Assembly.complete

    def counted(self: Assembly) -> object:  # type: ignore[type-arg]
        counts.append(len(self._waiting))
        return complete(self)

    monkeypatch.setattr(Assembly, "complete", counted)
    return counts


@SIZES
@pytest.mark.parametrize("make_model", [mlp, Mixed])
@pytest.mark.parametrize("batch_dim", [0, None])
def test_exact_however_many_wait(
    large: int,
    full: int,
    make_model: Callable[[], nn.Module],
    batch_dim: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "_LARGE", large)
    monkeypatch.setattr(assembly, "_FULL", full)
    model = make_model()
    engine = Engine(model, batch_dim=batch_dim)
    for _ in range(3):
        assert_exact(engine, per_sample(model(batch(4, 3))), model)
    losses = per_sample(model(batch(4, 3)))
    weights = torch.tensor([1.0, 0.0, -2.0, 3.0])
    expected = torch.autograd.grad(losses, [*model.parameters()], weights, retain_graph=True)
    engine.backward(losses, lambda gramian: weights)  # noqa: ARG005
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert_close_to_reference(parameter.grad, gradient)


def test_what_needs_the_graph_does_not_wait(waiting: list[int]) -> None:
    model = Mixed()
    engine = Engine(model)
    with seen_uses() as uses:
        losses = per_sample(model(batch(4, 3)))
    assert [use.needs_graph for use in uses] == [False, False, False, False, True]
    engine.compute_gramian(losses)
    assert waiting[-1] == 4


def test_room_is_limited(waiting: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "_FULL", 40)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(7)))  # 20 elements each, and their input
    Engine(model).compute_gramian(per_sample(model(batch(4, 5))))
    assert waiting[-1] == 1  # of seven: three times, two were taken in
    monkeypatch.setattr(assembly, "_LARGE", 19)
    Engine(model).compute_gramian(per_sample(model(batch(4, 5))))
    assert waiting[-1] == 0


@pytest.mark.parametrize("keeps", [False, True], ids=["alone", "beside losses of earlier steps"])
def test_factors_are_dropped_on_the_way(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A use that only other losses depend on is not waited for."""
    monkeypatch.setattr(assembly, "_LARGE", 0)  # each use is taken in at once
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(8)))
    engine = Engine(model, verify="never")
    kept, waiting = [], []
    add = Assembly._add

    def counted(self: Assembly, *args: Any) -> None:  # type: ignore[type-arg]
        add(self, *args)
        waiting.append(sum(account.columns is not None for account in self._accounts.values()))

    monkeypatch.setattr(Assembly, "_add", counted)
    for _ in range(3):
        losses = per_sample(model(batch(4, 5)))
        kept += [losses] if keeps else []
        engine.compute_gramian(losses)
    assert max(waiting) == 2  # the weight and the bias of one layer
