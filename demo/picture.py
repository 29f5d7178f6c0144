"""Pictures of the trainings on digits, and of the two competing tasks."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, PercentFormatter

from demo.control import Control
from demo.digits import N_CLASSES
from demo.probe import N_PER_CLASS, Look

COLORS = ("#4d4d4d", "#a6a6a6", "#d95f02")


def draw_training(names: Sequence[str], looks: Sequence[Sequence[Look]], epoch: int) -> Figure:
    """Draw the loss and the conflicts over the epochs, and two cosine Gramians after one of them.

    Args:
        names: Name of each training.
        looks: For each training, one look before the first epoch and one after every epoch.
        epoch: Draw the Gramians of the first and of the last training after this epoch.
    """
    figure = Figure(figsize=(8, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.5, 1))
    loss_axes = figure.add_subplot(grid[1, 0])
    draw_losses(loss_axes, names, looks)
    draw_conflicts(figure.add_subplot(grid[1, 1], sharex=loss_axes), names, looks)

    gramian_axes = [figure.add_subplot(grid[0, i]) for i in range(2)]
    ends = (names[0], names[-1]), (looks[0], looks[-1])
    for axes, name, own_looks in zip(gramian_axes, *ends, strict=True):
        image = draw_cosines(axes, own_looks[epoch])
        axes.set_title(f"{name}, epoch {epoch}", fontsize=11)
    gramian_axes[0].set_ylabel("class of sample i")
    bar = figure.colorbar(image, ax=gramian_axes, shrink=0.85, pad=0.02)
    bar.set_label("cosine of the gradients of samples i and j")
    return figure


def draw_losses(axes: Axes, names: Sequence[str], looks: Sequence[Sequence[Look]]) -> None:
    """The training loss on a logarithmic axis, one curve per training."""
    for name, own_looks, color in zip(names, looks, COLORS, strict=True):
        axes.semilogy([look.loss for look in own_looks], label=name, color=color, linewidth=2)
    axes.set_title("Mean training loss", fontsize=11)
    axes.set_xlabel("epoch")
    axes.grid(which="major", alpha=0.3)


def draw_conflicts(axes: Axes, names: Sequence[str], looks: Sequence[Sequence[Look]]) -> None:
    """The share of conflicting pairs, one curve per training."""
    for name, own_looks, color in zip(names, looks, COLORS, strict=True):
        axes.plot([look.conflicts for look in own_looks], label=name, color=color, linewidth=2)
    axes.set_title("Conflicting pairs of gradients", fontsize=11)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)


def draw_cosines(axes: Axes, look: Look) -> AxesImage:
    """A cosine Gramian, with the classes marked on both axes."""
    cosines = look.cosines.numpy()
    image = axes.imshow(cosines, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
    centers = [N_PER_CLASS * (c + 0.5) - 0.5 for c in range(N_CLASSES)]
    borders = [N_PER_CLASS * c - 0.5 for c in range(1, N_CLASSES)]
    labels = [str(c) for c in range(N_CLASSES)]
    axes.set_xticks(centers, labels=labels)
    axes.set_yticks(centers, labels=labels)
    axes.tick_params(length=0)
    axes.set_xlabel("class of sample j")
    for border in borders:
        axes.axhline(border, color="black", linewidth=0.4, alpha=0.5)
        axes.axvline(border, color="black", linewidth=0.4, alpha=0.5)
    return image


def draw_control(control: Control) -> Figure:
    """Draw both losses of each training."""
    figure = Figure(figsize=(6, 4.4), layout="constrained")
    draw_tasks(figure.add_subplot(), control)
    return figure


def draw_tasks(axes: Axes, control: Control) -> None:
    """Both losses: for each seed, SGD as a line over weights, and Jacobian descent as a point."""
    columns = {1.0: control.sgd, **control.weighted}
    for seed, own in enumerate(control.jacobian):
        line = [outcomes[seed] for outcomes in columns.values()]
        axes.plot(
            [x.class_loss for x in line],
            [x.drawing_loss for x in line],
            "o-",
            color=COLORS[1],
            label=None if seed else "SGD, rate tuned, numbers: weight of the class loss",
        )
        for weight, outcome in zip(columns, line, strict=True):
            place = outcome.class_loss, outcome.drawing_loss
            axes.annotate(f"{weight:g}", place, (4, 4), textcoords="offset points", fontsize=8)
        axes.plot(
            [line[0].class_loss, own.class_loss],
            [line[0].drawing_loss, own.drawing_loss],
            "*:",
            color=COLORS[2],
            markersize=13,
            markevery=[1],
            label=None if seed else "Jacobian descent, same rate, no weight",
        )
    axes.set(xlabel="loss of the classes", ylabel="loss of the drawings")
    axes.set_title(
        f"Two tasks that compete, {len(control.sgd)} seeds: further left and down is better",
        fontsize=11,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
