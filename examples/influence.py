"""Which training samples help, and which hurt, on a validation batch.

To first order, a step along the negative gradient of training sample b changes the validation loss
by -lr <J_b, mean of the validation gradients>. One cross-Gramian, or one Jacobian-vector product,
gives the value of every sample of a step. Some labels here are wrong; their samples rank last.

Pruthi, Liu, Sundararajan and Kale, Estimating Training Data Influence by Tracing Gradient Descent,
2020, arXiv:2002.08484; Wang et al., Data Shapley in One Training Run, 2024, arXiv:2406.11011.
"""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from autogram import Engine
from examples.problem import Batch, draw, is_short, make_model
from examples.showing import print_table, save


def values(engine: Engine, training: Tensor, validation: Tensor) -> Tensor:
    """How much reducing each training loss reduces the mean validation loss: ``(B,)``.

    Args:
        engine: The engine of the model.
        training: Losses of training samples, ``(B,)``.
        validation: Losses of validation samples, ``(C,)``.
    """
    of_training, of_validation = engine.jacobian(training), engine.jacobian(validation)
    return of_training.cross_gramian(of_validation).mean(1)


def find_wrong_labels(
    steps: int, *, size: int = 60, wrong: int = 12
) -> tuple[Batch, Tensor, Tensor]:
    """Trains with the first labels wrong, and sums the values and losses seen on the way.

    Returns:
        The samples, their values, and their losses, each ``(size,)``.
    """
    training, validation = draw(size, noise=0.02), draw(200, noise=0.02)
    training = Batch(training.x, training.y.clone())
    training.y[:wrong] = 1 - training.y[:wrong]
    model = make_model()
    engine = Engine(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    of_values, of_losses = torch.zeros(size), torch.zeros(size)
    for step in range(steps):
        if step % 10 == 0:
            losses = training.losses(model)
            of_values += values(engine, losses, validation.losses(model))
            of_losses += losses.detach()
        training.losses(model).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return training, of_values, of_losses


def share_found(scores: Tensor, wrong: int, looked_at: int) -> float:
    """The share of the wrong labels (the first ones) among the samples with the least scores."""
    return float((scores.argsort()[:looked_at] < wrong).sum() / wrong)


def main(*, steps: int, seeds: int, wrong: int = 12) -> None:
    """Prints the share of wrong labels that is found, and draws the samples of the last seed."""
    found: dict[int, list[list[float]]] = {count: [] for count in (6, 12, 18, 24)}
    for seed in range(seeds):
        torch.manual_seed(seed)
        training, of_values, of_losses = find_wrong_labels(steps, wrong=wrong)
        for count, shares in found.items():
            both = of_values, -of_losses
            shares.append([share_found(scores, wrong, count) for scores in both])
    rows = []
    for count, shares in found.items():
        by_value, by_loss = torch.tensor(shares).mean(0).tolist()
        rows.append((count, f"{by_value:.0%}", f"{by_loss:.0%}", f"{count / len(of_values):.0%}"))
    print_table(("samples looked at", "by least value", "by largest loss", "by chance"), rows)
    figure = Figure(figsize=(5.4, 4.4), layout="constrained")
    axes = figure.subplots()
    largest = float(of_values.abs().max())
    for label, marker in ((0, "o"), (1, "s")):
        some = training.y == label
        x, y = training.x[some].T.tolist()
        shown = axes.scatter(
            x,
            y,
            c=of_values[some].tolist(),
            cmap="RdBu",
            vmin=-largest,
            vmax=largest,
            marker=marker,
            edgecolors=["black" if i < wrong else "none" for i in some.nonzero().squeeze(1)],
            label=f"labelled {label}",
        )
    figure.colorbar(shown, label="value of the sample for validation")
    axes.set_title("wrong labels have a black edge", fontsize=10)
    axes.legend(frameon=False)
    save(figure, "influence")


if __name__ == "__main__":
    is_brief = is_short(__doc__)
    main(steps=100 if is_brief else 400, seeds=1 if is_brief else 5)
