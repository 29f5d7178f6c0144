"""Multi-task learning: one trunk, three tasks, and weights of their losses from the Gramian.

A small convolutional network looks at digits, and tells the class, whether the digit is odd, and
where the ink is. The objectives are the mean losses of the three tasks on a batch, in a dict. The
Gramian is therefore 3 x 3, and costs as much as three backward passes. The table compares the plain
sum of the losses, weightings of the Gramian, and each task alone with its own trunk.

Yu et al., Gradient Surgery for Multi-Task Learning, 2020, arXiv:2001.06782 (PCGrad); Quinton and
Rey, Jacobian Descent for Multi-Objective Optimization, 2024, arXiv:2406.16232 (UPGrad).
"""

import time
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram.monitor import ConflictMonitor
from autogram.plot import plot_history
from autogram.weightings import PCGrad, UPGrad
from demo.digits import Images, load_images
from examples.problem import is_short
from examples.showing import print_table, save

TASKS = ("class", "odd", "ink")
BATCH = 64


class MultiTask(nn.Module):
    """A narrow trunk, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.shared = nn.Sequential(nn.Linear(128, 12), nn.Tanh())
        self.heads = nn.ModuleDict({"class": nn.Linear(12, 10), "odd": nn.Linear(12, 1)})
        self.heads["ink"] = nn.Linear(12, 2)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Images ``(B, 1, 8, 8)`` to the output of each head."""
        hidden = self.shared(self.trunk(pixels))
        return {task: self.heads[task](hidden) for task in TASKS}


def losses_of(outputs: dict[str, Tensor], images: Images) -> dict[str, Tensor]:
    """The mean loss of each task on some images."""
    odd = (images.labels % 2).to(images.pixels.dtype)
    return {
        "class": F.cross_entropy(outputs["class"], images.labels),
        "odd": F.binary_cross_entropy_with_logits(outputs["odd"].squeeze(1), odd),
        "ink": (outputs["ink"] - centre(images)).square().mean(),
    }


def centre(images: Images) -> Tensor:
    """The mean position of each image's ink, ``(B, 2)``, in pixels from the middle."""
    places = torch.arange(8.0) - 3.5
    ink = images.pixels.squeeze(1) / images.pixels.sum((1, 2, 3)).view(-1, 1, 1)
    return torch.stack([ink.sum(1) @ places, ink.sum(2) @ places], 1)


def errors(model: nn.Module, images: Images) -> list[float]:
    """Share of wrong classes, share of wrong parities, and mean distance from the ink in pixels."""
    with torch.no_grad():
        outputs = model(images.pixels)
    wrong = outputs["class"].argmax(1) != images.labels
    odd = (outputs["odd"].squeeze(1) > 0) != (images.labels % 2 == 1)
    away = (outputs["ink"] - centre(images)).norm(dim=1)
    return [float(wrong.float().mean()), float(odd.float().mean()), float(away.mean())]


def train(
    weighting: Callable[[Tensor], Tensor], epochs: int, seed: int, only: str | None = None
) -> tuple[list[float], ConflictMonitor, float]:
    """Trains; returns errors on the test images, a monitor's record, and milliseconds of a step."""
    training, test = load_images(seed)
    torch.manual_seed(seed)
    model = MultiTask()
    engine, monitor = Engine(model, batch_dim=None), ConflictMonitor(weighting)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    times = []
    for _ in range(epochs):
        for indices in torch.randperm(len(training)).split(BATCH):
            start = time.perf_counter()
            batch = training.select(indices)
            losses = losses_of(model(batch.pixels), batch)
            if only is None:
                engine.backward(losses, monitor)
            else:
                with engine.paused():
                    losses[only].backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
    return errors(model, test), monitor, 1e3 * float(torch.tensor(times).median())


def main(*, epochs: int, seeds: int) -> None:
    """Compares weightings on several seeds."""
    weightings: dict[str, Callable[[Tensor], Tensor]] = {
        "sum of the losses": lambda gramian: gramian.new_ones(len(gramian)),
        "unit norms": lambda gramian: gramian.diagonal().clamp(min=1e-20).rsqrt(),
        "PCGrad": PCGrad(),
        "UPGrad": UPGrad(),
    }
    rows, monitors = [], {}
    for name, weighting in weightings.items():
        found, times, conflicts = [], [], []
        for seed in range(seeds):
            wrong, monitors[name], milliseconds = train(weighting, epochs, seed)
            found.append(wrong)
            times.append(milliseconds)
            looks = [numbers.conflicting for _, numbers in monitors[name].history()]
            conflicts.append(sum(looks) / len(looks))
        mean = [sum(column) / seeds for column in zip(*found, strict=True)]
        share = f"{sum(conflicts) / seeds:.0%}"
        rows.append((name, *_texts(mean), share, f"{sum(times) / seeds:.2f}"))
    alone = [
        sum(train(weightings["UPGrad"], epochs, seed, task)[0][i] for seed in range(seeds)) / seeds
        for i, task in enumerate(TASKS)
    ]
    rows.append(("each task alone", *_texts(alone), "-", "-"))
    head = (
        "weights",
        "wrong class",
        "wrong parity",
        "ink, pixels",
        "pairs in conflict",
        "ms a step",
    )
    print_table(head, rows)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("PCGrad", "UPGrad"), strict=True):
        plot_history(monitors[name], axes=axes)
        axes.set_title(f"cosines of the tasks, {name}", fontsize=10)
    save(figure, "multitask")


def _texts(errors: list[float]) -> list[str]:
    """Formats the errors of the tasks for a table."""
    return [f"{errors[0]:.1%}", f"{errors[1]:.1%}", f"{errors[2]:.3f}"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    is_brief = is_short(__doc__)
    main(epochs=1 if is_brief else 15, seeds=1 if is_brief else 3)
