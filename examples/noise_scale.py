"""The gradient noise scale: how large a batch is worth its cost.

With g_b the gradients of B samples and G their Gramian, the noise of a single gradient, tr(S), and
the squared norm of the true gradient have unbiased estimates from the diagonal and the mean of G:

    tr(S) = (mean of G_bb - mean of G) * B / (B - 1)        |g|^2 = mean of G - tr(S) / B

Their ratio is the batch size at which noise and signal are equal. Smaller batches need about as
many samples but more steps; larger ones about as many steps but more samples. Some are printed.

McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018,
arXiv:1812.06162, section 2.2.
"""

import torch

from autogram import Engine
from autogram.monitor import noise_and_signal
from examples.problem import draw, is_short, make_model
from examples.showing import print_table


def train(steps: int) -> list[tuple[int, float]]:
    """Trains, and returns the noise scale at some steps."""
    model = make_model()
    engine = Engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    noise, signal = torch.zeros(()), torch.zeros(())
    for step in range(1, steps + 1):
        losses = draw(64).losses(model)
        _, gramian = engine.backward(
            losses, lambda gramian: gramian.new_full((len(gramian),), 1 / 64), return_gramian=True
        )
        optimizer.step()
        optimizer.zero_grad()
        # The estimates are unbiased, but not their ratio: average them over steps first.
        now = noise_and_signal(gramian)
        noise, signal = (0.9 * x + 0.1 * new for x, new in zip((noise, signal), now, strict=True))
        if step % max(1, steps // 8) == 0:
            found.append((step, float(noise / signal)))
    return found


def samples_needed(size: int, *, goal: float, most: int) -> tuple[int, int]:
    """Steps and samples until the loss is below a goal, with batches of one size.

    The learning rate grows with the root of the size, as long as training is stable.
    """
    torch.manual_seed(0)
    model, test = make_model(), draw(1000)
    rate = min(1.0, 0.1 * (size / 4) ** 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(1, most + 1):
        draw(size).losses(model).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            with torch.no_grad():
                if test.losses(model).mean() < goal:
                    break
    return step, step * size


def main(*, steps: int, sizes: tuple[int, ...]) -> None:
    """Prints the noise scale during training, and the needs of batches of several sizes."""
    torch.manual_seed(0)
    found = train(steps)
    print_table(("step", "noise scale, samples"), [(step, f"{x:.0f}") for step, x in found])
    print("\nTo reach a loss of 0.3 (see its noise scale in the table):")
    most = 20 * steps
    rows = [(size, *samples_needed(size, goal=0.3, most=most)) for size in sizes]
    print_table(("batch size", "steps", "samples"), rows)


if __name__ == "__main__":
    if is_short(__doc__):
        main(steps=40, sizes=(16, 64))
    else:
        main(steps=2000, sizes=(4, 16, 64, 256, 1024))
