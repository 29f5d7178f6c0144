"""The demo's control: both ways see the same, and the note says what the table says."""

import pytest
import torch

from autogram import Engine
from autogram.weightings import UPGrad
from demo.control import Outcome, Squeeze, compare, make_note, of_equal_length, train
from demo.digits import load_images
from demo.training import as_long_as_the_mean


@pytest.fixture(autouse=True)
def single_precision() -> None:
    """As a user runs it."""
    torch.set_default_dtype(torch.float32)


def test_steps_are_as_long() -> None:
    """As that of the sum of the losses, and of their mean."""
    images, _ = load_images(0)
    model = Squeeze()
    gramian = Engine(model, batch_dim=None).compute_gramian(model.losses(images))
    weights = of_equal_length(gramian)
    assert torch.allclose(weights @ gramian @ weights, gramian.sum())
    scaled = as_long_as_the_mean(UPGrad()(gramian), gramian)
    assert torch.allclose(scaled @ gramian @ scaled, gramian.mean())
    assert not torch.allclose(weights, torch.ones(2))


def test_trainings_of_the_control() -> None:
    """Each is the same each time, and both ways differ."""
    sgd, again, jacobian = (
        train(by_gramian=by_gramian, rate=0.1, seed=1, epochs=2)
        for by_gramian in (False, False, True)
    )
    assert sgd == again != jacobian
    assert jacobian.drawing_loss < 5


def test_the_best_rate_is_taken() -> None:
    """One with which SGD diverges is not."""
    calls: list[None] = []
    best, sgd, jacobian = compare((1e3, 0.1), (0, 1), 1, lambda: calls.append(None))
    assert best == 0.1
    assert len(sgd) == len(jacobian) == 2
    assert len(calls) == 6


def test_note_is_about_the_numbers() -> None:
    sgd = [Outcome(1.0, 0.5, 2.0), Outcome(1.0, 0.5, 2.0)]
    jacobian = [Outcome(0.5, 0.5, 3.0), Outcome(1.1, 0.5, 3.0)]
    note = make_note(sgd, jacobian)
    assert "by -20% (less in 1 of 2 seeds)" in note
    assert "drawings by +50%" in note
