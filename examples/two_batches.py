"""Weightings that need the products of two independent batches, J1 J2^T.

MoDo and SDMGrad estimate the weights of several objectives without the bias of using one
batch in both factors. They need the cross-Gramian, and no Jacobian is formed.

Chen, Fernando, Ying and Chen, Three-Way Trade-Off in Multi-Objective Learning, 2023,
arXiv:2305.20057 (MoDo); Xiao, Ban and Ji, Direction-Oriented Multi-Objective Learning, 2023,
arXiv:2305.18409 (SDMGrad).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchjd.aggregation import MoDoWeighting, SDMGradWeighting

from autogram import Engine
from examples.problem import draw, is_short
from examples.showing import print_table

TASKS = 3


class MultiTask(nn.Module):
    """A trunk with one output for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, TASKS))

    def forward(self, x: Tensor) -> Tensor:
        """Maps points ``(B, 2)`` to outputs ``(B, TASKS)``."""
        outputs: Tensor = self.trunk(x)
        return outputs


def draw_losses(model: nn.Module) -> Tensor:
    """The losses of the tasks on a random batch, ``(TASKS,)``: three functions of the point."""
    x = draw(64).x
    targets = torch.stack([x.norm(dim=1), x.prod(1), (3 * x[:, 0]).sin()], 1)
    losses: Tensor = (model(x) - targets).square().mean(0)
    return losses


def train(weighting: Callable[[Tensor], Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Trains with three batches per step: two for the weights, and one for the update.

    Returns:
        The losses of the tasks before and after.
    """
    model = MultiTask()
    engine = Engine(model, batch_dim=None)  # each loss is a mean over the batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = draw_losses(model).detach()
    for _ in range(steps):
        first, second = (engine.jacobian(draw_losses(model)) for _ in range(2))
        weights = weighting(first.cross_gramian(second))
        draw_losses(model).backward(weights)
        optimizer.step()
        optimizer.zero_grad()
    return before, draw_losses(model).detach()


if __name__ == "__main__":
    torch.manual_seed(0)
    steps, rows = 30 if is_short(__doc__) else 1000, []
    for weighting in (MoDoWeighting(), SDMGradWeighting()):
        before, after = train(weighting, steps)
        pairs = zip(before.tolist(), after.tolist(), strict=True)
        rows.append((type(weighting).__name__, *(f"{x:.3f} to {y:.3f}" for x, y in pairs)))
    print_table(("weights", "distance", "product", "wave"), rows)
