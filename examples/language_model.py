"""A small language model, and what the Gramians of its batches say while it learns.

A transformer of a third of a million parameters reads the reference of Python that ships with it,
letter by letter. Each of the 32 pieces of a batch is an objective. The step is that of Adam with
each piece's gradient clipped to the median norm; it needs the Gramian's diagonal. The same Gramian
says how many pieces pull in different directions, how many independent directions there are, and
how large a batch would be worth having, which grows while the model learns. Printed beside it: what
a step costs with and without it.

McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018,
arXiv:1812.06162 (the noise scale).
"""

import time
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from autogram import Engine
from autogram.monitor import ConflictMonitor
from autogram.plot import plot_history
from examples.problem import is_short
from examples.showing import print_table, save
from examples.text import LanguageModel, Text, losses_of, reference, validate, write

BATCH = 32


def clipped(gramian: Tensor) -> Tensor:
    """Weights that make the longer half of the gradients as long as the median one."""
    norms = gramian.diagonal().sqrt()
    return (norms.median() / norms).clamp(max=1) / len(gramian)


def train(
    model: nn.Module, text: Text, steps: int, report: Callable[[int], None]
) -> tuple[ConflictMonitor, float]:
    """Trains: what the monitor saw, and milliseconds of a step."""
    monitor = ConflictMonitor(clipped, every=2)
    times = []
    with Engine(model, batch_dim=0) as engine:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(1, steps + 1):
            start = time.perf_counter()
            engine.backward(losses_of(model, text.draw(BATCH)), monitor)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
            report(step)
    return monitor, 1e3 * float(torch.tensor(times).median())


def plain_step(model: nn.Module, text: Text, steps: int) -> float:
    """Milliseconds of a step on the mean loss, without an engine."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        losses_of(model, text.draw(BATCH)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return 1e3 * float(torch.tensor(times).median())


def main(*, steps: int) -> None:
    """Trains, and prints a table on the way."""
    torch.manual_seed(0)
    text, model = Text(reference()), LanguageModel()
    bits: dict[int, float] = {}
    shown = {steps * i // 8 for i in range(1, 9)}

    def report(step: int) -> None:
        if step in shown:
            bits[step] = validate(model, text)

    monitor, milliseconds = train(model, text, steps, report)
    history, rows, before = monitor.history(), [], 0
    for step in sorted(bits):
        part = [numbers for at, numbers in history if before <= at < step]
        noise, signal = (sum(getattr(x, name) for x in part) for name in ("noise", "signal"))
        conflicts, rank = (
            sum(getattr(x, name) for x in part) / len(part)
            for name in ("conflicting", "effective_rank")
        )
        scale = f"{noise / signal:.0f}" if signal > 0 else "large"
        rows.append((step, f"{bits[step]:.2f}", f"{conflicts:.0%}", f"{rank:.1f}", scale))
        before = step
    head = ("step", "bits a letter", "pairs in conflict", "effective rank", "noise scale, pieces")
    print_table(head, rows)
    without = plain_step(model, text, min(steps, 30))
    ratio = milliseconds / without
    print(f"A step takes {milliseconds:.0f} ms; without a Gramian, {without:.0f} ms ({ratio:.2f}).")
    print(f"\n{write(model, 'The class statement ', 240)}\n")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, names in zip(
        figure.subplots(1, 2),
        (("mean_cosine", "least_cosine"), ("effective_rank",)),
        strict=True,
    ):
        plot_history(monitor, names, axes=axes)
    save(figure, "language_model")


if __name__ == "__main__":
    main(steps=16 if is_short(__doc__) else 400)
