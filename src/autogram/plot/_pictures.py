"""The heat map of cosines, with the objectives sorted; curves over training; norms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from autogram._arguments import check_square
from autogram.errors import InvalidOperandError
from autogram.monitor import ConflictMonitor, Numbers, cosines
from autogram.monitor._numbers import NAMES

_LABELS = {  # if the name with spaces is not clear enough
    "conflicting": "share of conflicting pairs",
    "least_cosine": "smallest cosine",
    "entropy": "entropy of the weights",
}


def new_axes() -> Axes:
    """Axes in a new figure, which has no window and is not part of pyplot's state."""
    return Figure(figsize=(6, 5), layout="constrained").add_subplot()


def plot_cosines(
    gramian: Tensor,
    *,
    sort: Tensor | Sequence[object] | Literal["cluster"] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """The cosines of the angles between all pairs of gradients, from blue (-1) to red (1).

    Args:
        gramian: ``(m, m)``, on any device.
        sort: The class of each objective, m integers or strings: objectives are sorted by class,
            and classes are marked at the axes. ``"cluster"`` brings objectives with similar
            gradients together. ``None`` leaves the order.
        axes: The axes to draw into; a new figure if ``None``.

    Returns:
        The axes. ``axes.figure.savefig(path)`` saves the picture.

    Raises:
        InvalidOperandError: The Gramian is not square, or the number of classes differs from m.
    """
    check_square(gramian)
    axes = axes or new_axes()
    table = cosines(gramian.detach().cpu())
    classes: list[object] = []
    if isinstance(sort, str):
        if sort != "cluster":
            raise InvalidOperandError(f'`sort` is {sort!r}. Pass classes, "cluster" or `None`.')
        order = by_cluster(gramian)
    elif sort is not None:
        classes = classes_of(sort, len(gramian))
        order = sorted(range(len(classes)), key=lambda i: rank(classes[i]))
    else:
        order = list(range(len(gramian)))
    image = axes.imshow(
        table[order][:, order].numpy(), vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest"
    )
    if classes:
        _mark(axes, [classes[i] for i in order])
    axes.set_xlabel("class of objective j" if classes else "objective j")
    axes.set_ylabel("class of objective i" if classes else "objective i")
    axes.figure.colorbar(image, ax=axes, label="cosine of the gradients of i and j")
    return axes


def classes_of(given: Tensor | Sequence[object], count: int) -> list[object]:
    """The classes of some objectives, in a list."""
    classes: list[object] = given.tolist() if isinstance(given, Tensor) else list(given)
    if len(classes) != count:
        raise InvalidOperandError(
            f"There are {len(classes)} classes and {count} objectives. Pass one class for each "
            "objective, in the row-major order of the losses."
        )
    return classes


def rank(label: Any) -> tuple[str, Any]:
    """The sort key of a class, for numbers and strings together."""
    return type(label).__name__, label


def _mark(axes: Axes, classes: Sequence[object]) -> None:
    """Marks sorted classes on both axes."""
    start, centers, labels = 0, [], []
    for label, members in groupby(classes):
        end = start + len(list(members))
        centers.append((start + end - 1) / 2)
        labels.append(str(label))
        if start:
            axes.axhline(start - 0.5, color="black", linewidth=0.4, alpha=0.5)
            axes.axvline(start - 0.5, color="black", linewidth=0.4, alpha=0.5)
        start = end
    axes.set_xticks(centers, labels=labels)
    axes.set_yticks(centers, labels=labels)
    axes.tick_params(length=0)


def by_cluster(gramian: Tensor) -> list[int]:
    """An order of the objectives in which objectives with similar gradients are neighbours.

    Objectives are ordered by the angle in the plane of the two leading eigenvectors of the cosines,
    cut at the largest gap: a spectral order, which needs no number of clusters.

    Args:
        gramian: ``(m, m)``. Costs an eigendecomposition on the CPU, O(m³).

    Returns:
        A permutation of the m indices.

    References:
        Friendly, Corrgrams: Exploratory Displays for Correlation Matrices, The American
        Statistician 56, 2002.
    """
    check_square(gramian)
    if len(gramian) < 3:
        return list(range(len(gramian)))
    table = cosines(gramian.detach().cpu().double()).nan_to_num()
    leading = torch.linalg.eigh(table).eigenvectors[:, -2:]
    angles, order = torch.atan2(leading[:, 0], leading[:, 1]).sort(stable=True)
    gaps = torch.cat([angles[1:], angles[:1] + 2 * torch.pi]) - angles
    cut = int(gaps.argmax()) + 1
    return [*order[cut:].tolist(), *order[:cut].tolist()]


def plot_history(
    monitor: ConflictMonitor | Iterable[tuple[int, Numbers]],
    names: Sequence[str] = ("mean_cosine", "least_cosine"),
    *,
    axes: Axes | None = None,
) -> Axes:
    """Numbers of a monitor over the steps of training, by default the mean and smallest cosine.

    Args:
        monitor: The monitor, or the result of its ``history()``.
        names: Attributes of :class:`autogram.monitor.Numbers`.
        axes: The axes to draw into; a new figure if ``None``.

    Returns:
        The axes.

    Raises:
        InvalidOperandError: A name is unknown.
    """
    history = list(monitor.history() if isinstance(monitor, ConflictMonitor) else monitor)
    for name in names:
        if name not in (*NAMES, "noise_scale"):
            raise InvalidOperandError(
                f"`{name}` is not recorded by a monitor. Pass some of {', '.join(NAMES)}, "
                "noise_scale."
            )
    axes = axes or new_axes()
    steps = [step for step, _ in history]
    for name in names:
        values = [getattr(numbers, name) for _, numbers in history]
        axes.plot(steps, values, label=_LABELS.get(name, name.replace("_", " ")))
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return axes


def plot_norms(
    gramian: Tensor, *, classes: Sequence[object] | Tensor | None = None, axes: Axes | None = None
) -> Axes:
    """The Euclidean norms of all gradients, in ascending order: one curve, or one for each class.

    Args:
        gramian: ``(m, m)``, on any device.
        classes: The class of each objective, or ``None``.
        axes: The axes to draw into; a new figure if ``None``.

    Returns:
        The axes, with a logarithmic scale if all norms are positive.

    Raises:
        InvalidOperandError: The Gramian is not square, or there is not one class for each
            objective.
    """
    check_square(gramian)
    norms = gramian.detach().diagonal().cpu().clamp(min=0).sqrt()
    labels = [None] * len(norms) if classes is None else classes_of(classes, len(norms))
    axes = axes or new_axes()
    for label in sorted(set(labels), key=rank):
        own = norms[[i for i, other in enumerate(labels) if other == label]].sort().values
        shares = torch.linspace(0, 1, len(own), device="cpu")
        axes.plot(shares.numpy(), own.numpy(), label=None if label is None else str(label))
    if bool((norms > 0).all()):
        axes.set_yscale("log")
    axes.set_xlabel("share of the objectives")
    axes.set_ylabel("norm of the gradient")
    axes.grid(alpha=0.3)
    if classes is not None:
        axes.legend(frameon=False)
    return axes
