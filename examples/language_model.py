"""A small language model, and what the Gramians of its batches tell while it learns.

A transformer with a third of a million parameters reads Python's own reference, letter by letter.
Each of the 32 pieces of a batch is an objective. Adam takes the steps, with each piece's gradient
clipped to the median norm; this needs the Gramian's diagonal. The same Gramian tells how many pairs
of pieces pull in different directions, how many independent directions there are, and
how large a useful batch would be, which grows while the model learns. The output also shows
the cost of a step with and without the Gramian.

McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018,
arXiv:1812.06162 (the noise scale).
"""

import copy

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from autogram import Engine
from autogram.monitor import ConflictMonitor
from autogram.plot import plot_history
from examples.problem import is_short
from examples.showing import milliseconds, print_table, save
from examples.text import LanguageModel, Text, losses_of, reference, validate, write

BATCH = 32


def clipped(gramian: Tensor) -> Tensor:
    """Weights that shorten the longer half of the gradients to the median norm."""
    norms = gramian.diagonal().sqrt()
    return (norms.median() / norms).clamp(max=1) / len(gramian)


class Learner:
    """A model in training, with an engine or without.

    Args:
        model: The model.
        monitor: Receives the Gramians and weighs the losses. Without one, no Gramian is computed.
    """

    def __init__(self, model: nn.Module, monitor: ConflictMonitor | None) -> None:
        self.model, self.monitor = model, monitor
        self.engine = None if monitor is None else Engine(model, batch_dim=0)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.text = Text(reference())

    def step(self) -> None:
        """Takes one training step."""
        losses = losses_of(self.model, self.text.draw(BATCH))
        if self.engine is None or self.monitor is None:
            losses.mean().backward()
        else:
            self.engine.backward(losses, self.monitor)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(*, steps: int, width: int) -> None:
    """Trains, and prints a table with the progress."""
    torch.manual_seed(0)
    monitor = ConflictMonitor(clipped, every=1 + steps // 400)
    learner = Learner(LanguageModel(width), monitor)
    without = Learner(copy.deepcopy(learner.model), None)
    rows, before = [], 0
    for part in range(1, 9):
        for _ in range(steps // 8):
            learner.step()
        seen = [numbers for at, numbers in monitor.history() if at >= before]
        before += steps // 8
        conflicts, rank = (
            sum(getattr(x, name) for x in seen) / len(seen)
            for name in ("conflicting", "effective_rank")
        )
        scale = f"{monitor.noise_scale(len(seen)):.0f}"
        bits = f"{validate(learner.model, learner.text):.2f}"
        rows.append((part * steps // 8, bits, f"{conflicts:.0%}", f"{rank:.1f}", scale))
    head = ("step", "bits a letter", "pairs in conflict", "effective rank", "noise scale, pieces")
    print_table(head, rows)
    both = {"with": learner.step, "without": without.step}
    times = milliseconds(both, rounds=min(steps, 15))
    ratio = times["with"] / times["without"]
    print(f"A step takes {times['with']:.0f} ms, {ratio:.2f} times as long as without a Gramian.")
    print(f"\n{write(learner.model, 'The class statement ', 240)}\n")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, names in zip(
        figure.subplots(1, 2),
        (("mean_cosine", "least_cosine"), ("effective_rank",)),
        strict=True,
    ):
        plot_history(monitor, names, axes=axes)
    save(figure, "language_model")


if __name__ == "__main__":
    is_brief = is_short(__doc__)
    main(steps=8 if is_brief else 400, width=16 if is_brief else 96)
