"""Table of the trainings on digits."""

from collections.abc import Callable, Sequence
from statistics import mean, median

from rich.table import Table

from demo.probe import Look
from demo.training import Step, Training


def make_table(trainings: Sequence[Training], looks: Sequence[Sequence[Look]]) -> Table:
    """Compare trainings; times are relative to those of the first one.

    Args:
        trainings: One column each.
        looks: For each training, one look before the first epoch and one after every epoch.
    """
    steps = [training.steps for training in trainings]
    totals = [median_ms(s, lambda step: step.total_s) for s in steps]
    gramians = [median_ms(s, lambda step: step.backward.gramian_s) for s in steps]
    weightings = [median_ms(s, lambda step: step.backward.weighting_s) for s in steps]
    bare = [median_ms(s, lambda step: step.total_s - step.backward.weighting_s) for s in steps]

    table = Table(title="Digits, after training", title_justify="left")
    table.add_column("")
    for training in trainings:
        table.add_column(training.title, justify="right")
    table.add_row("Test accuracy", *[f"{x[-1].accuracy:.1%}" for x in looks])
    table.add_row("Mean training loss", *[f"{x[-1].loss:.4f}" for x in looks])
    table.add_row("Conflicting pairs of gradients (1)", *[f"{conflicts(x):.1%}" for x in looks])
    table.add_row("Sum of the weights, mean (2)", *[f"{weight_sum(s):.2f}" for s in steps])
    table.add_section()
    table.add_row("Time per step, median", *[f"{ms:.2f} ms" for ms in totals])
    table.add_row("  of which the Gramian", *[milliseconds_or_dash(ms) for ms in gramians])
    table.add_row("  of which the weights (3)", *[milliseconds_or_dash(ms) for ms in weightings])
    table.add_row("Time per step, ratio", *[f"{ms / totals[0]:.2f}" for ms in totals])
    table.add_row("  without the weights (3)", *[f"{ms / totals[0]:.2f}" for ms in bare])
    return table


def make_notes(n_samples: int, n_epochs: int) -> str:
    """Explain the numbers in brackets of the table."""
    return (
        f"(1) Pairs of different samples whose gradients have a negative inner product, among "
        f"{n_samples} training images, ten of each class; the mean of {n_epochs} looks, one after "
        f"each epoch.\n"
        "(2) The mean loss has weights 1/m, which add up to 1. UPGrad's are scaled so that steps "
        "are as long as those along the mean gradient. Where a network can learn all samples, as "
        "here, changing the direction gains little.\n"
        "(3) UPGrad solves one quadratic program per sample, all of them together. Each "
        "aggregator has its own cost here; the rest of the step is the engine's."
    )


def conflicts(looks: Sequence[Look]) -> float:
    """Mean share of conflicting pairs, without the first look, which is the same for all."""
    return mean(look.conflicts for look in looks[1:])


def weight_sum(steps: Sequence[Step]) -> float:
    """Mean over the steps of the sum of the losses' weights."""
    return mean(step.backward.weights.sum().item() for step in steps)


def median_ms(steps: Sequence[Step], seconds: Callable[[Step], float]) -> float:
    """Median over the steps, in milliseconds; it ignores a few slow steps of a busy machine."""
    return 1e3 * median(seconds(step) for step in steps)


def milliseconds_or_dash(ms: float) -> str:
    """A time, or a dash for a part that a step does not have."""
    return f"{ms:.2f} ms" if ms else "-"
