"""Per-sample gradient clipping, as in differentially private training (DP-SGD).

`engine.clip` adds up the samples' gradients, each scaled down to a norm of at most C. Norms and sum
come from the factors of one pass: no single sample's gradient is formed. Noise is added to the
clipped sum. The table shows the effect on accuracy: clipping alone costs some, a little
noise moves the training off its plateaus, and much noise costs most. The privacy gained depends on
the noise and on the number of steps and samples: ask an accountant.

Abadi et al., Deep Learning with Differential Privacy, 2016, arXiv:1607.00133; Bu et al.,
Differentially Private Optimization on Large Model at Small Cost, 2022, arXiv:2210.00038.
"""

import torch

from autogram import Engine
from examples.problem import draw, is_short, make_model
from examples.showing import print_table


def train(steps: int, *, bound: float = 0.5, noise: float = 0.3) -> tuple[float, float]:
    """Trains with clipped and noisy gradients.

    Returns:
        The accuracy after the training, and the share of gradients clipped.
    """
    model, size = make_model(), 64
    engine = Engine(model, batch_dim=0)  # raises an error where samples are mixed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / min(bound, 1))
    clipped = []
    for _ in range(steps):
        norms = engine.clip(draw(size).losses(model), bound)
        for parameter in model.parameters():
            assert parameter.grad is not None
            if noise:
                parameter.grad += noise * bound * torch.randn_like(parameter)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        clipped.append((norms > bound).float().mean())
    with torch.no_grad():
        test = draw(2000)
        right = model(test.x).argmax(1) == test.y
    return float(right.float().mean()), float(torch.stack(clipped).mean())


def main(*, steps: int) -> None:
    """Trains with several bounds and noise levels, and prints the results."""
    rows = []
    for bound in (1e6, 1.0, 0.2):
        for noise in (0.0, 4.0, 16.0) if bound < 1e6 else (0.0,):
            torch.manual_seed(0)
            accuracy, share = train(steps, bound=bound, noise=noise)
            name = f"{bound:g}" if bound < 1e6 else "none"
            rows.append((name, f"{noise:g}", f"{share:.0%}", f"{accuracy:.1%}"))
    print_table(("bound", "noise", "clipped", "accuracy"), rows)


if __name__ == "__main__":
    main(steps=20 if is_short(__doc__) else 1000)
