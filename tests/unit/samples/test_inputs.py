"""Inputs of one module that have different numbers of parts for each sample."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import CoupledObjectivesWarning, Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import assert_exact, batch, counted_passes, per_sample

LENGTH, WIDTH = 6, 4


class Pictures(nn.Module):
    """Words ``(n, LENGTH)`` and pictures, several for each sample or the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(9, WIDTH), nn.Linear(3, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, pictures: Tensor) -> Tensor:
        seen = self.second(self.first(pictures).tanh()).tanh()
        read = self.second(self.words(words)).mean(1)
        n = min(len(read), len(seen))
        return read.reshape(n, -1, WIDTH).sum(1) * seen.reshape(n, -1, WIDTH).mean(1)


def are_derived(engine: Engine) -> bool:
    """Whether a call read a tensor that was computed from parameters alone."""
    return any(use.is_derived for of in engine.report().parameters for use in of.uses)


def words(samples: int) -> Tensor:
    return torch.randint(9, (samples, LENGTH))


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (3,)])
def test_several_pictures_for_each_text(shape: tuple[int, ...], verify: Any) -> None:
    """All of them are batched: no layer is taken for a function of parameters alone."""
    model = Pictures()
    engine = Engine(model, verify=verify)
    for samples, pictures in ((4, 2), (3, 3), (4, 5), (1, 3), (7, 2)):
        output = model(words(samples), batch(samples * pictures, *shape))
        assert_exact(engine, per_sample(output), model)
        assert not are_derived(engine) or samples == 1
        assert "one sample" not in str(engine.report()) or samples == 1


def test_several_texts_for_each_picture() -> None:
    model = Pictures()
    engine = Engine(model)
    for samples, texts in ((4, 2), (3, 3), (4, 5), (1, 3), (7, 2)):
        assert_exact(engine, per_sample(model(words(samples * texts), batch(samples, 3))), model)
        assert not are_derived(engine) or samples == 1
        assert "one sample" not in str(engine.report()) or samples == 1


class Points(Pictures):
    """Pictures that all samples look at."""

    def forward(self, words: Tensor, pictures: Tensor) -> Tensor:
        seen = self.second(self.first(pictures).tanh()).tanh()
        return self.words(words).mean(1) @ seen.flatten(0, -2).T


@pytest.mark.parametrize("batch_dim", ["auto", 0])
def test_points_for_all_samples(batch_dim: Any) -> None:
    """One step goes through the network for each sample, without a warning, and no other does."""
    model = Points()
    engine = Engine(model, batch_dim=batch_dim)
    are_coupled = []
    for samples in (5, 4, 5, 2):
        assert_exact(engine, per_sample(model(words(samples), batch(7, 3))), model)
        are_coupled.append("one sample" in str(engine.report()))
    assert are_coupled == [True, False, False, False]


def test_losses_that_are_coupled() -> None:
    """Where samples are mixed, the user is told so one step later."""
    model = Pictures()
    engine = Engine(model)

    def step() -> None:
        output = model(words(5), batch(10, 3))
        assert_exact(engine, per_sample(output - output.mean(0)), model)

    step()
    with pytest.warns(CoupledObjectivesWarning):
        step()


def test_one_sample_behind_losses_that_were_as_many_as_its_words() -> None:
    """A row of integers is the sample, and no row of positions: its calls are recorded."""
    model = nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH))
    engine = Engine(model, unseen="error")
    output = model(words(3))
    numbers = [(output - i).square().mean() for i in range(LENGTH)]
    engine.compute_gramian(numbers)
    assert_exact(engine, per_sample(model(words(1))), model)


def test_an_input_without_elements() -> None:
    """As of boxes that no picture has."""

    class Boxes(Pictures):
        def forward(self, words: Tensor, pictures: Tensor) -> Tensor:
            return self.words(words).mean(1) + self.words(pictures).sum((0, 1))

    model = Boxes()
    engine = Engine(model)
    for samples in (4, 3):
        output = model(words(samples), torch.zeros(0, 2, dtype=torch.long))
        assert_exact(engine, per_sample(output), model)


def test_a_wrong_guess_takes_the_memory_of_a_step() -> None:
    """A pass for each objective, in place of one for all: there may be thousands of samples."""

    class Operator(nn.Module):
        """Functions, known at some points, at other points, which are the same for all."""

        def __init__(self) -> None:
            super().__init__()
            self.functions, self.points = nn.Linear(3, WIDTH), nn.Linear(2, WIDTH)

        def forward(self, functions: Tensor, points: Tensor) -> Tensor:
            return self.functions(functions).tanh() @ self.points(points).tanh().T

    model = Operator()
    engine = Engine(model, verify="never")
    functions, points = [], batch(7, 2)
    for _ in range(3):
        losses = per_sample(model(batch(5, 3), points))
        with counted_passes(losses) as passes:
            gramian = engine.compute_gramian(losses)
        report = engine.report()
        functions.append({use.function for of in report.parameters for use in of.uses})
        assert {of.name for of in report.parameters} == dict(model.named_parameters()).keys()
        jacobian = reference_jacobian(losses, trainable(model))
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
    assert functions == [{"an ordinary pass"}, *[{"linear", "matmul"}] * 2]
    assert len(passes) == 1
