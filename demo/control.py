"""A control: two conflicting tasks, by SGD with a tuned rate, and by Jacobian descent.

A network squeezes each digit into four numbers, and from these tells its class and draws it again.
The tasks compete for the four numbers. SGD descends on the sum of the losses, with the best of some
learning rates. It also runs with several weights on the class loss, as one would tune by hand.
Jacobian descent with UPGrad takes steps of the length of SGD's, at the same rate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram.weightings import UPGrad
from demo.digits import N_CLASSES, Images, load_images

BATCH_SIZE = 64
WIDTH = 4


@dataclass(frozen=True)
class Outcome:
    """Results of one trained model on unseen images.

    Attributes:
        class_loss: Cross-entropy of the classes.
        accuracy: Share of correct classes.
        drawing_loss: Squared distance from the drawing to the image.
    """

    class_loss: float
    accuracy: float
    drawing_loss: float


@dataclass(frozen=True)
class Control:
    """Outcomes of all methods, at the best learning rate for SGD.

    Attributes:
        rate: This rate.
        sgd: One outcome for each seed, of SGD on the sum of the losses.
        jacobian: The same of Jacobian descent.
        weighted: The same of SGD, by weight of the class loss.
    """

    rate: float
    sgd: list[Outcome]
    jacobian: list[Outcome]
    weighted: dict[float, list[Outcome]]


class Squeeze(nn.Module):
    """Maps images to class scores and to drawings, through a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.Tanh()
        )
        self.classes, self.drawing = nn.Linear(WIDTH, N_CLASSES), nn.Linear(WIDTH, 64)

    def losses(self, images: Images) -> Tensor:
        """The mean losses of both tasks, of shape ``(2,)``."""
        few = self.trunk(images.pixels)
        away = (self.drawing(few) - images.pixels.flatten(1)).square().sum(1)
        return torch.stack([F.cross_entropy(self.classes(few), images.labels), away.mean()])


def of_equal_length(gramian: Tensor) -> Tensor:
    """UPGrad's weights, scaled so that the step is as long as one on the sum of the losses."""
    weights = UPGrad()(gramian)
    return weights * (gramian.sum() / (weights @ gramian @ weights)).sqrt()


def train(
    *, by_gramian: bool, rate: float, seed: int, epochs: int, class_weight: float = 1.0
) -> Outcome:
    """Train once; every method sees the images in the same order."""
    training, test = load_images(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Squeeze()
        orders = [torch.randperm(len(training)) for _ in range(epochs)]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    engine = Engine(model, batch_dim=None) if by_gramian else None
    for indices in (part for order in orders for part in order.split(BATCH_SIZE)):
        losses = model.losses(training.select(indices))
        if engine is None:
            (losses * torch.tensor([class_weight, 1.0])).sum().backward()
        else:
            engine.backward(losses, of_equal_length)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        class_loss, drawing_loss = model.losses(test).tolist()
        scores = model.classes(model.trunk(test.pixels))
    right = scores.argmax(1) == test.labels
    return Outcome(class_loss, float(right.float().mean()), drawing_loss)


def compare(
    rates: Sequence[float],
    class_weights: Sequence[float],
    seeds: Sequence[int],
    epochs: int,
    advance: Callable[[], None],
) -> Control:
    """Find the best rate for SGD, and train with it by each method.

    Args:
        rates: Learning rates to try, with the first seed, for SGD on the sum of both losses.
        class_weights: Weights of the class loss to try in SGD.
        seeds: Of the weights, the split and the batches.
        epochs: Passes through the images.
        advance: Called after each training.
    """
    sums: dict[float, float] = {}
    for rate in rates:
        tried = train(by_gramian=False, rate=rate, seed=seeds[0], epochs=epochs)
        total = tried.class_loss + tried.drawing_loss
        sums[rate] = total if total == total else float("inf")
        advance()
    best = min(sums, key=sums.__getitem__)

    def outcomes(by_gramian: bool, class_weight: float = 1.0) -> list[Outcome]:
        found = []
        for seed in seeds:
            found.append(
                train(
                    by_gramian=by_gramian,
                    rate=best,
                    seed=seed,
                    epochs=epochs,
                    class_weight=class_weight,
                )
            )
            advance()
        return found

    weighted = {weight: outcomes(False, weight) for weight in class_weights}
    return Control(best, outcomes(False), outcomes(True), weighted)


def make_table(control: Control) -> Table:
    """A table of means over seeds, each with the least and the largest value."""
    seeds = len(control.sgd)
    title = f"Classes and drawings from four numbers, rate {control.rate:g}, {seeds} seeds"
    table = Table(title=title, title_justify="left")
    for header in ("", "SGD on the sum, rate tuned", "Jacobian descent, equal steps"):
        table.add_column(header, justify="right" if header else "left")
    both = (control.sgd, control.jacobian)
    table.add_row(
        "Wrong classes", *[_spread([100 - 100 * x.accuracy for x in of], "%") for of in both]
    )
    table.add_row("Loss of the classes", *[_spread([x.class_loss for x in of]) for of in both])
    table.add_row("Loss of the drawings", *[_spread([x.drawing_loss for x in of]) for of in both])
    return table


def make_note(control: Control) -> str:
    """Say in words what the table shows."""
    sgd, jacobian = control.sgd, control.jacobian
    better = sum(j.class_loss < s.class_loss for s, j in zip(sgd, jacobian, strict=True))
    classes = mean(x.class_loss for x in jacobian) / mean(x.class_loss for x in sgd) - 1
    drawings = mean(x.drawing_loss for x in jacobian) / mean(x.drawing_loss for x in sgd) - 1
    lines = [list(line) for line in zip(sgd, *control.weighted.values(), strict=True)]
    beyond = sum(is_below(own, line) for own, line in zip(jacobian, lines, strict=True))
    return (
        f"Drawings have the larger gradients, so the sum follows them. Steps that conflict with "
        f"neither task change the loss of the classes by {classes:+.0%} (less in {better} of "
        f"{len(sgd)} seeds) and that of the drawings by {drawings:+.0%}. SGD with a weight of the "
        f"classes ({', '.join(f'{weight:g}' for weight in control.weighted)}) trades one loss for "
        f"the other. Jacobian descent has no weight to tune, and in {beyond} of {len(sgd)} seeds "
        "ends below the line of these trades."
    )


def is_below(own: Outcome, line: Sequence[Outcome]) -> bool:
    """Whether an outcome is below the line through others, in the plane of the two losses."""
    points = sorted((x.class_loss, x.drawing_loss) for x in line)
    for (left, first), (right, last) in pairwise(points):
        if left <= own.class_loss <= right:
            share = (own.class_loss - left) / (right - left)
            return own.drawing_loss < first + share * (last - first)
    return False


def _spread(values: Sequence[float], unit: str = "") -> str:
    """The mean, the least and the largest."""
    digits = 1 if unit else 3
    low, middle, high = (f"{f(values):.{digits}f}" for f in (min, mean, max))
    return f"{middle}{unit} ({low} to {high})"
