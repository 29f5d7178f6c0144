"""Per-sample gradient clipping, as in differentially private training (DP-SGD).

The sum of the samples' gradients, each scaled down to a norm of at most C, is J^T w with
w_b = min(1, C / |J_b|). Norms and sum come from the factors of one pass: no gradient of a single
sample is formed, and the noise is added to their clipped sum.

Abadi et al., Deep Learning with Differential Privacy, 2016, arXiv:1607.00133; Bu et al.,
Differentially Private Optimization on Large Model at Small Cost, 2022, arXiv:2210.00038.
"""

import torch
from torch import Tensor

from autogram import Engine
from examples.problem import draw, is_short, make_model


def accumulate_clipped(engine: Engine, losses: Tensor, bound: float) -> Tensor:
    """Adds the sum of clipped gradients into `.grad`, and returns the norms ``(B,)``."""
    jacobian = engine.jacobian(losses)
    norms = jacobian.row_norms()
    jacobian.accumulate_grad((bound / norms).clamp(max=1))
    return norms


def train(steps: int, *, bound: float = 0.5, noise: float = 0.3) -> tuple[float, float]:
    """Trains with clipped and noisy gradients.

    Returns:
        The mean loss after the training, and the share of gradients that were clipped.
    """
    model, size = make_model(), 64
    engine = Engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    clipped = []
    for _ in range(steps):
        norms = accumulate_clipped(engine, draw(size).losses(model), bound)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += noise * bound * torch.randn_like(parameter)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        clipped.append((norms > bound).float().mean())
    with torch.no_grad():
        loss = draw(1000).losses(model).mean()
    return float(loss), float(torch.stack(clipped).mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    loss, share = train(steps=20 if is_short(__doc__) else 1500)
    print(f"mean loss {loss:.3f}, {share:.0%} of the gradients were clipped")
