"""Instance-wise risk minimisation: each sample of a batch is an objective of its own.

A step along the mean gradient may increase the loss of some samples. From the Gramian, UPGrad
computes a combination of the samples' gradients that conflicts with none of them. The table
compares both with steps of equal length, at several learning rates, on digits of which half the
classes are rare; it also shows the time of a step.

At an equal rate, UPGrad gets further, also on rare classes. It does not solve rarity: the mean
tolerates a rate of 0.4, at which UPGrad diverges on two seeds of three. At its best rate, the mean
classifies more images of rare classes correctly (66% against 58%), and its steps take two thirds of
the time.

Quinton and Rey, Jacobian Descent for Multi-Objective Optimization, 2024, arXiv:2406.16232.
"""

import time
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from autogram import Engine
from autogram.monitor import ConflictMonitor, Numbers
from autogram.plot import plot_history
from autogram.weightings import UPGrad
from demo.digits import Images, load_images, make_classifier
from examples.problem import is_short
from examples.showing import print_table, save

BATCH, RARE, KEPT = 32, (1, 3, 5, 8, 9), 6


def mean(gramian: Tensor) -> Tensor:
    """The weights of ordinary training."""
    return gramian.new_full((len(gramian),), 1 / len(gramian))


def as_long_as_the_mean(weighting: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A weighting whose steps are as long as those along the mean gradient, for a fair comparison.

    They are lengthened at most fourfold: where gradients cancel, only rounding is left.
    """

    def scaled(gramian: Tensor) -> Tensor:
        weights = weighting(gramian)
        of_mean, own = gramian.mean(), weights @ gramian @ weights
        return weights * (of_mean.clamp(min=0) / own.clamp(min=1e-30)).sqrt().clamp(max=4)

    return scaled


def make_rare(images: Images) -> Images:
    """Keeps only a few images of some classes."""
    kept = []
    for label in range(10):
        of_class = (images.labels == label).nonzero().squeeze(1)
        kept.append(of_class[:KEPT] if label in RARE else of_class)
    return images.select(torch.cat(kept))


def train(
    weighting: Callable[[Tensor], Tensor],
    rate: float,
    images: Images,
    test: Images,
    epochs: int,
    seed: int,
) -> tuple[list[float], list[tuple[int, Numbers]]]:
    """Trains; accuracy of frequent and of rare classes, training loss, and milliseconds of a step.

    The second result is the record of a monitor.
    """
    model = make_classifier(seed)
    monitor = ConflictMonitor(as_long_as_the_mean(weighting))
    engine = Engine(model, batch_dim=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    times = []
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for indices in order[: len(order) - len(order) % BATCH].split(BATCH):
            start = time.perf_counter()
            batch = images.select(indices)
            losses = F.cross_entropy(model(batch.pixels), batch.labels, reduction="none")
            engine.backward(losses, monitor)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
    with torch.no_grad():
        right = model(test.pixels).argmax(1) == test.labels
        loss = F.cross_entropy(model(images.pixels), images.labels)
    is_rare = torch.isin(test.labels, torch.tensor(RARE))
    middle = 1e3 * float(torch.tensor(times).median())
    accuracies = [float(right[some].float().mean()) for some in (~is_rare, is_rare)]
    return [*accuracies, float(loss), middle], monitor.history()


def main(*, epochs: int, seeds: int) -> None:
    """Compares weightings, with steps of equal length, on several seeds."""
    cases: list[tuple[str, Callable[[Tensor], Tensor], float]] = [
        *(("mean", mean, rate) for rate in (0.1, 0.2, 0.4)),
        *(("UPGrad", UPGrad(), rate) for rate in (0.1, 0.2, 0.4)),
    ]
    rows, histories = [], {}  # records of the last seed
    for name, weighting, rate in cases:
        found = []
        for seed in range(seeds):
            training, test = load_images(seed)
            images = make_rare(training)
            numbers, histories[name, rate] = train(weighting, rate, images, test, epochs, seed)
            found.append(numbers)
        frequent, rare, loss, milliseconds = torch.tensor(found).T
        spread = f"{rare.min():.1%} to {rare.max():.1%}"
        middle = f"{frequent.mean():.1%}", f"{rare.mean():.1%}", spread, f"{loss.mean():.4f}"
        rows.append((name, rate, *middle, f"{milliseconds.mean():.1f}"))
    head = ("weights", "rate", "frequent classes", "rare ones", "over seeds", "training loss")
    print_table((*head, "ms a step"), rows)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    best = ("mean", 0.4), ("UPGrad", 0.2)
    for axes, (name, rate) in zip(figure.subplots(1, 2, sharey=True), best, strict=True):
        plot_history(histories[name, rate], axes=axes)
        axes.set_title(f"{name}, rate {rate}", fontsize=10)
    save(figure, "instance_wise")


if __name__ == "__main__":
    torch.set_num_threads(1)
    is_brief = is_short(__doc__)
    main(epochs=1 if is_brief else 12, seeds=1 if is_brief else 3)
