"""Two conflicting losses of two numbers: where averaging leads, and where Jacobian descent leads.

The problem is that of Liu et al., Conflict-Averse Gradient Descent, 2021, arXiv:2110.14048, with
five starts and the first loss multiplied by 0.1, as in Navon et al., Multi-Task Learning as a
Bargaining Game, 2022, arXiv:2202.01017. Both methods use Adam, as these papers do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from autogram import Engine
from autogram.weightings import UPGrad

STARTS = ((-8.5, 7.5), (0.0, 0.0), (9.0, 9.0), (-7.5, -0.5), (9.0, -1.0))
SCALES = (0.1, 1.0)  # factors of the losses
RATE = 0.02
PARETO = ((-7.0, 7.0), (-8.33, -8.33))  # ends of the line of best trades
FLOOR = 5e-6  # smallest argument of a logarithm
COLORS = ("#4d4d4d", "#d95f02")


def both_losses(points: Tensor) -> Tensor:
    """The two unscaled losses at points ``(..., 2)``, of the same shape."""
    x, y = points.unbind(-1)
    valleys = (0.5 * (-x - 7) + y.tanh(), 0.5 * (-x + 3) + y.tanh() + 2)
    above = [valley.abs().clamp(min=FLOOR).log() + 6 for valley in valleys]
    below = [((-x + c).square() + 0.1 * (-y - 8).square()) / 10 - 20 for c in (7, -7)]
    is_above, is_below = (0.5 * y).tanh().clamp(min=0), (-0.5 * y).tanh().clamp(min=0)
    pairs = zip(above, below, strict=True)
    return torch.stack([is_above * a + is_below * b for a, b in pairs], -1)


class Points(nn.Module):
    """All starts at once. Their gradients are orthogonal, so that none affects another's weights.

    Double precision, because slopes at the logarithms are up to 1e5 times as steep as elsewhere.
    """

    def __init__(self, starts: Sequence[Sequence[float]] = STARTS) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.tensor(starts, dtype=torch.float64))

    def forward(self) -> Tensor:
        """The scaled losses, of shape ``(starts, 2)``."""
        return both_losses(self.points) * torch.tensor(SCALES)


def start_by_start(gramian: Tensor) -> Tensor:
    """UPGrad's weights for the two losses of each start, of shape ``(2 * starts,)``.

    Between starts, the Gramian is zero. Each start's part is divided by its size, which changes
    none of its weights: beside slopes of 1e5, other starts would otherwise count as zero.
    """
    sizes = gramian.diagonal().view(-1, 2).sum(1).repeat_interleave(2).sqrt()
    return UPGrad()(gramian / sizes.outer(sizes))


@dataclass(frozen=True)
class Courses:
    """Points that both methods have passed through.

    Attributes:
        mean: Points of the descent on the mean loss, of shape ``(steps + 1, starts, 2)``.
        jacobian: The same for Jacobian descent.
    """

    mean: Tensor
    jacobian: Tensor


def descend(steps: int, *, by_gramian: bool) -> Tensor:
    """Descend with one method from all starts: points of shape ``(steps + 1, starts, 2)``."""
    model = Points()
    engine = Engine(model, batch_dim=None) if by_gramian else None
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    course = [model.points.detach().clone()]
    for _ in range(steps):
        losses = model()
        if engine is None:
            losses.mean().backward()
        else:
            engine.backward(losses, start_by_start)
        optimizer.step()
        optimizer.zero_grad()
        course.append(model.points.detach().clone())
    return torch.stack(course)


def compare(steps: int) -> Courses:
    """Descend with both methods, with the same rate and number of steps."""
    return Courses(descend(steps, by_gramian=False), descend(steps, by_gramian=True))


def make_note(courses: Courses) -> str:
    """Say in words what the picture shows."""
    ends = [both_losses(course[-1]) for course in (courses.mean, courses.jacobian)]  # (starts, 2)
    first, second = [(end[:, 0].median().item(), end[:, 1].median().item()) for end in ends]
    return (
        f"The mean follows the larger loss: it ends at median losses of {first[0]:.1f} and "
        f"{first[1]:.1f} (sum {sum(first):.1f}). Jacobian descent, whose steps conflict with "
        f"neither loss, ends at {second[0]:.1f} and {second[1]:.1f} (sum {sum(second):.1f}). The "
        "limits: if you knew that the first loss is ten times too small, the mean with that weight "
        "would do as well; and the start at the upper right is slow for both."
    )


def draw(courses: Courses) -> Figure:
    """The courses of both methods, over the contours of the sum of the losses."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("mean of the losses", "Jacobian descent (UPGrad)")
    both = (courses.mean, courses.jacobian)
    for axes, title, course, color in zip(panels, titles, both, COLORS, strict=True):
        _draw_course(axes, course, color)
        axes.set_title(title, fontsize=15)
    panels[0].legend(loc="upper center", fontsize=11, framealpha=0.9)
    return figure


def _draw_course(axes: Axes, course: Tensor, color: str) -> None:
    """Draw the course of one method."""
    side = torch.linspace(-10.5, 10.5, 150)
    grid = torch.cartesian_prod(side, side)
    heights = both_losses(grid).sum(1).view(150, 150).T
    axes.contourf(
        side.tolist(), side.tolist(), heights.tolist(), levels=24, cmap="Blues_r", alpha=0.6
    )
    axes.plot(*PARETO, color="black", linewidth=4, alpha=0.5, label="best trades")
    for path in course.unbind(1):
        x, y = path.T.tolist()
        axes.plot(x, y, color=color, linewidth=1.8)
        axes.plot(x[:1], y[:1], "o", color="white", markeredgecolor="black", markersize=7)
        axes.plot(x[-1:], y[-1:], "*", color=color, markeredgecolor="white", markersize=16)
    axes.plot([], [], "o", color="white", markeredgecolor="black", label="start")
    axes.plot([], [], "*", color=color, markersize=12, label="end")
    axes.set(xlim=(-10.5, 10.5), ylim=(-10.5, 10.5), xticks=(), yticks=())
    axes.set_aspect("equal")
