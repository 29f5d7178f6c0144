"""Models whose first input does not count the samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import CoupledObjectivesWarning, Engine
from tests.unit._capture.seen import seen_uses
from tests.unit.engines import assert_exact, batch, per_sample

WIDTH = 4


class Matched(nn.Module):
    """Scores of images for classes, whose names come first, with a learned token for each name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.token = nn.Embedding(9, WIDTH), nn.Parameter(batch(1, WIDTH))
        self.names, self.images = nn.Linear(WIDTH, WIDTH), nn.Linear(3, WIDTH)

    def forward(self, names: Tensor, images: Tensor) -> Tensor:
        """Of shape ``(images, classes)``."""
        tokens = torch.cat([self.token.expand(len(names), 1, -1), self.words(names)], 1)
        return self.images(images) @ self.names(tokens).tanh().mean(1).T


class Points(nn.Module):
    """Functions at some points, which come first."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.functions = nn.Linear(2, WIDTH), nn.Linear(3, WIDTH)

    def forward(self, points: Tensor, functions: Tensor) -> Tensor:
        """Of shape ``(functions, points)``."""
        return self.functions(functions) @ self.points(points).tanh().T


def classify(model: nn.Module, samples: int) -> Tensor:
    scores = model(torch.randint(9, (6, 5)), batch(samples, 3))
    return F.cross_entropy(scores, torch.randint(6, (samples,)), reduction="none")


def evaluate(model: nn.Module, samples: int) -> Tensor:
    return per_sample(model(batch(7, 2), batch(samples, 3)))


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize(("make", "losses_of"), [(Matched, classify), (Points, evaluate)])
def test_the_second_input_counts(
    make: Callable[[], nn.Module], losses_of: Callable[..., Tensor], verify: Any
) -> None:
    """One step goes through the network for each sample, without a warning."""
    model = make()
    engine = Engine(model, verify=verify)
    are_coupled = []
    for samples in (8, 4, 8, 2, 3, 4):
        assert_exact(engine, losses_of(model, samples), model)
        are_coupled.append("one sample" in str(engine.report()))
    assert are_coupled == [True, *[False] * 5]


def test_points_in_time_come_first() -> None:
    """No layer is taken for one of constants, in a model whose samples would be apart anyway."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, times: Tensor, state: Tensor) -> Tensor:
            for step in times.diff():
                state = state + step * self.layer(state).tanh()
            return state

    model = Steps()
    engine = Engine(model)
    for samples in (5, 4, 6):
        with seen_uses() as seen:
            losses = per_sample(model(torch.linspace(0, 1, 4), batch(samples, 3)))
        if samples != 5:
            assert [use.function for use in seen] == ["linear"] * 3
        assert_exact(engine, losses, model)


def test_losses_that_are_as_many_as_something_else() -> None:
    """Tasks that are as many as the second input has rows: the first input counts again."""
    model = Points()
    engine = Engine(model)

    def step(*, is_of_tasks: bool) -> bool:
        output = model(batch(8, 2), batch(3, 3)).T
        losses = output[:3].square().sum(1) + output.mean() if is_of_tasks else per_sample(output)
        assert_exact(engine, losses, model)
        return "one sample" in str(engine.report())

    with pytest.warns(CoupledObjectivesWarning):
        are_coupled = [step(is_of_tasks=i % 2 == 0) for i in range(8)]
    assert are_coupled[::2] == [True] * 4
    assert not any(are_coupled[5::2])
