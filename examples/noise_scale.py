"""The gradient noise scale: how large a batch is worth its cost.

With g_b the gradients of B samples and G their Gramian, the noise of a single one, tr(S), and the
squared norm of the true gradient have unbiased estimates from the diagonal and the mean of G:

    tr(S) = (mean of G_bb - mean of G) * B / (B - 1)        |g|^2 = mean of G - tr(S) / B

Their ratio is the batch size at which noise and signal are equal.

McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018,
arXiv:1812.06162, section 2.2.
"""

import torch

from autogram import Engine
from autogram.monitor import noise_and_signal
from examples.problem import draw, is_short, make_model


def train(steps: int) -> list[tuple[int, float]]:
    """Trains, and returns some steps with the noise scale there."""
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
        # Each estimate has no bias, but their ratio has: so they are averaged over steps first.
        now = noise_and_signal(gramian)
        noise, signal = (0.9 * x + 0.1 * new for x, new in zip((noise, signal), now, strict=True))
        if step % max(1, steps // 8) == 0:
            found.append((step, float(noise / signal)))
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    for step, scale in train(steps=40 if is_short(__doc__) else 2000):
        print(f"step {step:5}: noise scale {scale:8.1f} samples")
