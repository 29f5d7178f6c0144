"""Curves over training, and the norms of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from matplotlib.axes import Axes
from torch import Tensor

from autogram._arguments import check_square
from autogram._errors import InvalidOperandError
from autogram.monitor import ConflictMonitor, Numbers
from autogram.monitor._numbers import NAMES
from autogram.plot._heat_map import classes_of, new_axes, rank

_LABELS = {  # where the name with spaces says too little
    "conflicting": "share of conflicting pairs",
    "least_cosine": "smallest cosine",
    "entropy": "entropy of the weights",
}


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
        axes: Where to draw; a new figure if ``None``.

    Returns:
        The axes.

    Raises:
        InvalidOperandError: There is no number of such a name.
    """
    history = list(monitor.history() if isinstance(monitor, ConflictMonitor) else monitor)
    for name in names:
        if name not in (*NAMES, "noise_scale"):
            raise InvalidOperandError(
                f"`{name}` is no number of a monitor. Pass some of {', '.join(NAMES)}, noise_scale."
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
    """The Euclidean norms of all gradients, in ascending order, as one curve or one for each class.

    Args:
        gramian: ``(m, m)``, on any device.
        classes: The class of each objective, or ``None``.
        axes: Where to draw; a new figure if ``None``.

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
