"""The demo's control: both ways see the same, and the note says what the table says."""

import pytest
import torch
from matplotlib.figure import Figure

from autogram import Engine
from autogram.weightings import UPGrad
from demo.control import Control, Outcome, Squeeze, compare, make_note, of_equal_length, train
from demo.digits import load_images
from demo.picture import draw_control, draw_tasks
from demo.training import as_long_as_the_mean

pytestmark = pytest.mark.cpu  # where the demo trains


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
    found = compare((1e3, 0.1), (2.0,), (0, 1), 1, lambda: calls.append(None))
    assert found.rate == 0.1
    assert len(found.sgd) == len(found.jacobian) == len(found.weighted[2.0]) == 2
    assert found.weighted[2.0] != found.sgd
    assert len(calls) == 8


def test_picture_has_each_outcome() -> None:
    """A line for each seed, with its weights, and a star."""
    sgd, weighted, jacobian = ([Outcome(i, 0.5, i + seed) for seed in (0, 1)] for i in (3, 2, 1))
    axes = Figure().add_subplot()
    draw_tasks(axes, Control(0.1, sgd, jacobian, {2.0: weighted}))
    lines = [(list(x.get_xdata()), list(x.get_ydata())) for x in axes.get_lines()]
    sgd_lines = [([3, 2], [3, 2]), ([3, 2], [4, 3])]
    assert (lines[::2], lines[1::2]) == (sgd_lines, [([3, 1], [3, 1]), ([3, 1], [4, 2])])
    assert [text.get_text() for text in axes.texts] == ["1", "2"] * 2
    (axes,) = draw_control(Control(0.1, sgd, jacobian, {2.0: weighted})).axes
    assert len(axes.get_lines()) == 4


def test_note_is_about_the_numbers() -> None:
    sgd = [Outcome(1.0, 0.5, 2.0), Outcome(1.0, 0.5, 2.0)]
    jacobian = [Outcome(0.5, 0.5, 2.9), Outcome(1.1, 0.5, 3.1)]
    weighted = [Outcome(0.4, 0.5, 3.2), Outcome(0.4, 0.5, 3.2)]
    note = make_note(Control(0.1, sgd, jacobian, {2.0: weighted}))
    assert "of the classes (2) trades" in note
    assert "in 1 of 2 seeds ends below the line" in note  # at 0.5, the line is at 3.0
    assert "by -20% (less in 1 of 2 seeds)" in note
    assert "drawings by +50%" in note
