"""Steps of K = 4 task losses on one trunk: gradient descent, torchjd's `mtl_backward`, and ours.

Run as ``python -m tests.speed.tasks``. Times are of the process, in rounds that take turns.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchjd import aggregation
from torchjd.autojac import jac_to_grad, mtl_backward

from autogram import Engine, representation
from autogram.weightings import UPGrad

TASKS = 4
SIZES = {"small": (64, 16, 32), "wide": (1024, 512, 64)}  # width, inputs and samples


class _Tasks(nn.Module):
    """Three layers, and a head for each task."""

    def __init__(self, width: int, inputs: int) -> None:
        super().__init__()
        sizes = [inputs, width, width, width]
        layers = [(nn.Linear(n, width), nn.ReLU()) for n in sizes[:3]]
        self.trunk = nn.Sequential(*[x for pair in layers for x in pair])
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(TASKS))


def make_step(name: str, size: str) -> Callable[[], None]:
    """One step of a training, by name: SGD, torchjd, fused, two passes, or representation."""
    width, inputs, samples = SIZES[size]
    torch.manual_seed(0)
    model, x = _Tasks(width, inputs), torch.randn(samples, inputs)
    targets = [torch.randn(samples, 1) for _ in range(TASKS)]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    has_engine = name in ("fused", "two passes")
    engine = Engine(model.trunk, batch_dim=None) if has_engine else None
    ours, theirs = UPGrad(), aggregation.UPGrad()

    def losses(features: Tensor) -> list[Tensor]:
        pairs = zip(model.heads, targets, strict=True)
        return [F.mse_loss(head(features), target) for head, target in pairs]

    def step() -> None:
        features = model.trunk(x)
        found = losses(features)
        if engine is None and name == "SGD":
            torch.stack(found).sum().backward()
        elif name == "representation":
            representation.backward(found, features, ours)
        elif engine is None:
            mtl_backward(found, features)
            jac_to_grad(model.trunk.parameters(), theirs)
        elif name == "fused":
            engine.backward(found, ours)
        else:
            torch.autograd.backward(found, list(ours(engine.compute_gramian(found))))
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(size: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of a step in each round."""
    names = ("SGD", "torchjd", "fused", "two passes", "representation")
    steps = {name: make_step(name, size) for name in names}
    for step in steps.values():
        for _ in range(repeats):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            start = time.process_time()
            for _ in range(repeats):
                steps[name]()
            times[name].append(1e3 * (time.process_time() - start) / repeats)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.speed.tasks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| trunk | step | ms | over SGD | over torchjd |\n| --- | --- | ---: | ---: | ---: |")
    for size in SIZES:
        repeats = options.repeats if size == "small" else max(1, options.repeats // 8)
        times = measure(size, options.rounds, repeats)
        for name, own in times.items():
            ratios = [
                median(a / b for a, b in zip(own, times[other], strict=True))
                for other in ("SGD", "torchjd")
            ]
            print(f"| {size} | {name} | {median(own):.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
