"""What the pictures show, read back from their axes."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from autogram import InvalidOperandError
from autogram.monitor import ConflictMonitor, cosines
from autogram.plot import by_cluster, plot_cosines, plot_history, plot_norms
from tests.unit.checks import irregular

GRAMIAN = irregular(6, 4) @ irregular(6, 4).T


def test_the_heat_map_is_of_cosines() -> None:
    axes = plot_cosines(GRAMIAN)
    image = axes.get_images()[0]
    assert torch.equal(torch.tensor(image.get_array().data), cosines(GRAMIAN))
    assert image.get_clim() == (-1, 1)


@pytest.mark.parametrize("classes", [torch.tensor([1, 0, 10, 1, 0, 2]), list("babbac")], ids=type)
def test_sorted_by_class(classes) -> None:
    axes = plot_cosines(GRAMIAN, sort=classes)
    own = list(classes)
    order = sorted(range(6), key=lambda i: own[i])
    found = torch.tensor(axes.get_images()[0].get_array().data)
    assert torch.equal(found, cosines(GRAMIAN)[order][:, order])
    labels = [label.get_text() for label in axes.get_xticklabels()]
    if isinstance(classes, list):
        assert labels == ["a", "b", "c"]
        assert axes.get_xticks().tolist() == [0.5, 3, 5]
    else:
        assert labels == ["0", "1", "2", "10"]
        assert axes.get_xticks().tolist() == [0.5, 2.5, 4, 5]


def test_clusters_are_neighbours() -> None:
    """Three directions, in turns, with a little noise."""
    directions = torch.linalg.qr(irregular(5, 5)).Q[:3]
    rows = directions[torch.arange(12) % 3] + 0.01 * irregular(12, 5)
    order = by_cluster(rows @ rows.T)
    assert sorted(order) == list(range(12))
    members = [i % 3 for i in order]
    assert sum(a != b for a, b in pairwise(members)) == 2
    found = torch.tensor(
        plot_cosines(rows @ rows.T, sort="cluster").get_images()[0].get_array().data
    )
    assert torch.equal(found, cosines(rows @ rows.T)[order][:, order])
    assert by_cluster(torch.eye(2)) == [0, 1]


def test_numbers_over_training() -> None:
    monitor = ConflictMonitor(every=2)
    for step in range(6):
        monitor.observe(torch.eye(3) * (step + 1) + 1)
    axes = plot_history(monitor)
    mean, least = axes.get_lines()
    assert mean.get_xdata().tolist() == [0, 2, 4]
    assert mean.get_ydata().tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 6])
    assert least.get_ydata().tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 6])
    axes = plot_history(monitor.history(), ["effective_rank", "noise_scale"])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "effective rank",
        "noise scale",
    ]


def test_norms_by_class() -> None:
    gramian = torch.diag(torch.tensor([16.0, 1.0, 9.0, 4.0]))
    (line,) = plot_norms(gramian).get_lines()
    assert line.get_ydata().tolist() == [1, 2, 3, 4]
    axes = plot_norms(gramian, classes=torch.tensor([1, 0, 1, 0]))
    assert [own.get_ydata().tolist() for own in axes.get_lines()] == [[1, 2], [3, 4]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["0", "1"]
    assert axes.get_yscale() == "log"
    gramian[0, 0] = 0
    assert plot_norms(gramian).get_yscale() == "linear"


def test_axes_of_the_user(tmp_path: Path) -> None:
    figure = Figure()
    left, middle, right = figure.subplots(1, 3)
    assert plot_cosines(GRAMIAN.float(), axes=left) is left
    assert plot_norms(GRAMIAN, axes=middle) is middle
    assert plot_history([], axes=right) is right
    path = tmp_path / "picture.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_refusals() -> None:
    with pytest.raises(InvalidOperandError, match=r"shape \(2, 3\)\. Pass a square matrix"):
        plot_cosines(torch.ones(2, 3))
    with pytest.raises(InvalidOperandError, match="There are 2 classes and 6 objectives"):
        plot_cosines(GRAMIAN, sort=[0, 1])
    with pytest.raises(InvalidOperandError, match='Pass classes, "cluster" or `None`'):
        plot_cosines(GRAMIAN, sort="class")
    with pytest.raises(InvalidOperandError, match="There are 2 classes and 6 objectives"):
        plot_norms(GRAMIAN, classes=[0, 1])
    with pytest.raises(
        InvalidOperandError, match=r"`cosine` is not recorded by a monitor\. Pass some of"
    ):
        plot_history([], ["cosine"])
