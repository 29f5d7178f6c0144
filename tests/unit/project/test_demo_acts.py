"""The acts of the demo compute what their pictures and notes say."""

import re
from itertools import count

import pytest
import torch
from torch import nn

from autogram import Engine
from autogram.testing import reference_jacobian
from autogram.weightings import Projector, UPGrad
from demo import __main__ as demo
from demo import equation, labels, times, toy
from demo.digits import Images, load_images, make_classifier
from examples.physics import Network, solution
from tests.unit.checks import assert_close_to_reference

pytestmark = pytest.mark.cpu  # where the demo runs


def test_toy_weighs_each_start_alone() -> None:
    """The weights are those of the starts one by one, however steep one of them is."""
    model = toy.Points(((-5.0, 2.0), (9.0, -1.0), (8.0, 0.01)))
    jacobian = reference_jacobian(model().flatten(), model.parameters())  # (6, 6)
    jacobian[:2] *= 1e5
    found = toy.start_by_start(jacobian @ jacobian.T).view(3, 2)
    for rows, weights in zip(jacobian.split(2), found, strict=True):
        # The regularisation is relative to the trace, which is three times as large for all.
        alone = UPGrad(projector=Projector(reg_eps=3e-4))(rows @ rows.T)
        assert_close_to_reference(weights / weights.sum(), alone / alone.sum())


def test_toy_has_its_best_trades_where_it_is_drawn() -> None:
    """Along the line, the gradients of both losses point in opposite directions."""
    (left, right), (height, _) = toy.PARETO
    across = torch.linspace(left + 0.5, right - 0.5, 9)
    points = torch.stack([across, torch.full_like(across, height)], 1).requires_grad_()
    first, second = (
        torch.autograd.grad(toy.both_losses(points)[:, i].sum(), points)[0] for i in (0, 1)
    )
    assert nn.functional.cosine_similarity(first, second).max() < -0.99


def test_toy_courses() -> None:
    """Both begin at the starts, and differ; the note names the sums of the losses at the ends."""
    courses = toy.compare(5)
    for course in (courses.mean, courses.jacobian):
        assert course.shape == (6, 5, 2)
        assert course[0].tolist() == [list(start) for start in toy.STARTS]
    assert not torch.allclose(courses.mean[-1], courses.jacobian[-1])
    ends = toy.both_losses(courses.jacobian[-1]).median(0).values
    assert f"(sum {sum(round(x, 10) for x in ends.tolist()):.1f})" in toy.make_note(courses)
    left, right = toy.draw(courses).axes
    drawn = [line.get_xydata().tolist() for line in right.get_lines()]
    courses_drawn = torch.tensor([points for points in drawn if len(points) == 6])
    assert torch.allclose(courses_drawn, courses.jacobian.transpose(0, 1))
    assert left.get_title() != right.get_title()


def test_a_tenth_of_the_labels_is_wrong() -> None:
    images, _ = load_images(0)
    found = labels.mislabel(images, seed=3)
    assert int((found.labels != images.labels).sum()) == round(len(images) / 10)
    assert found.labels.max() < 10
    assert found.pixels is images.pixels


def test_values_are_cosines() -> None:
    """Of each sample's gradient with the mean gradient of the clean images, by plain autograd."""
    images, clean = (
        images.select(torch.arange(size))
        for images, size in zip(load_images(0), (7, 5), strict=True)
    )
    images, clean = (Images(x.pixels.double(), x.labels) for x in (images, clean))
    model = make_classifier(0).double()
    rows, others = (
        reference_jacobian(labels.losses_of(model, x), model.parameters()) for x in (images, clean)
    )
    found = labels.values_of(Engine(model), model, images, clean)
    assert_close_to_reference(found, nn.functional.cosine_similarity(rows, others.mean(0), dim=1))


def test_wrong_labels_come_first() -> None:
    """More of them than chance would find among the first tenth."""
    torch.set_default_dtype(torch.float32)
    found = labels.search(epochs=4, seed=0)
    n_wrong = int(found.is_wrong.sum())
    shares = labels.shares_found(found.values, found.is_wrong)
    assert shares[-1] == 1
    assert shares[n_wrong - 1] > 0.5
    note = labels.make_note(found)
    assert note.startswith(f"{n_wrong} of {len(found.truth)} labels are wrong.")
    assert f"finds {shares[n_wrong - 1]:.0%} of these by gradients" in note
    panels = labels.draw(found).axes
    worst = found.values.argsort()[: labels.N_SHOWN]
    assert [re.findall(r"\d", axes.get_title())[0] for axes in panels] == [
        str(label) for label in found.images.labels[worst].tolist()
    ]


def test_map_of_errors() -> None:
    """Zero where a network is the solution, and elsewhere the distance from it."""

    class Solution(Network):
        def forward(self, points):
            return solution(points) + 0.25 * (points[:, 0] > 0.5), points[:, 0]

    errors = equation.errors_of(Solution())
    assert errors[: equation.SIDE // 2].abs().max() == 0
    assert (errors[equation.SIDE // 2 :] - 0.25).abs().max() < 1e-12


def test_equation_is_solved_by_both_ways() -> None:
    """From one network, in double precision, which ends with them; Adam has twice the time."""
    torch.set_default_dtype(torch.float32)
    found = equation.solve(3)
    assert torch.get_default_dtype() == torch.float32
    assert all(solved.errors.dtype == torch.float64 for solved in found.values())
    newton, adam = (found[name].course for name in ("Gauss-Newton", "Adam"))
    assert len(newton) == 3
    assert adam[-1][0] >= 2 * newton[-1][0]
    assert f"Gauss-Newton {newton[-1][1]:.0e}" in equation.make_note(found)
    assert len(equation.draw(found).axes) == 3  # and the bar of colours


def test_times_are_medians_of_the_steps_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each reading moves on by more than the one before."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(times, "MODELS", {"small": (lambda: nn.Linear(3, 10), (3,))})
    readings = count()
    monkeypatch.setattr(times, "process_time", lambda: next(readings) ** 2)
    turns: list[None] = []
    found = times.measure(2, 3, lambda: turns.append(None))["small"]
    assert len(turns) == 5
    # Warm steps have one reading each, and torchjd leaves out the first: 3 + 4. Steps that count
    # have two readings, and in the second of three rounds the median time.
    firsts = {kind: 3 + 4 + 8 + 2 * k for k, kind in enumerate(found)}
    assert found == {kind: (first + 1) ** 2 - first**2 for kind, first in firsts.items()}


def test_bars_are_ratios_to_sgd() -> None:
    seconds = {"SGD": 2.0, "autogram, two passes": 3.0, "torchjd": 9.0}
    found = {"one": seconds, "two": dict.fromkeys(seconds, 1.0)}
    first, second = times.draw(found).axes
    assert [bar.get_width() for bar in first.patches] == [1.0, 1.5, 4.5]
    assert [bar.get_width() for bar in second.patches] == [1.0, 1.0, 1.0]
    assert "one: 1.5, 4.5; two: 1.0, 1.0." in times.make_note(found)


def test_kinds_of_steps_train_alike() -> None:
    """With the weights of the mean, each changes the model as SGD does."""
    torch.set_default_dtype(torch.float32)
    models: list[nn.Module] = []

    def make_model() -> nn.Module:
        torch.manual_seed(0)  # also of the batch, which is drawn next
        models.append(nn.Linear(3, 10))
        return models[-1]

    for step in times.make_steps(make_model, (3,)).values():
        step()
    first, *others = models
    assert len(others) == 3
    for other in others:
        torch.testing.assert_close(other.weight, first.weight)


def test_an_act_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["demo", "toys"])
    with pytest.raises(SystemExit, match="2"):
        demo.parse_arguments()
    assert "there is no act toys; pass some of toy, labels" in capsys.readouterr().err
