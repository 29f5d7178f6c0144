"""Steps by a representation, and of Gauss and Newton, where there are several processes."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from autogram import Engine, UnsupportedError, representation
from autogram.optim import GaussNewton
from autogram.testing import reference_jacobian
from autogram.weightings import UPGrad
from tests.unit.checks import assert_close_to_reference
from tests.unit.processes import RANKS, Scenario


class Tasks(nn.Module):
    """A trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(5, 2) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden = self.trunk(x)
        return hidden, [head(hidden).square().mean() * 10**i for i, head in enumerate(self.heads)]


def gradients_are_averaged(rank: int) -> None:
    """Each process weighs its own losses, in one pass in which gradients are exchanged."""
    torch.manual_seed(0)
    model, twin = Tasks(), Tasks()
    twin.load_state_dict(model.state_dict())
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(3 + rank, 3)
        hidden, losses = wrapped(x)
        representation.backward(losses, hidden, UPGrad())
        hidden, losses = twin(x)
        total = torch.stack(losses)
        rows = reference_jacobian(total, [hidden])
        weights = UPGrad()(rows @ rows.T)
        total.backward(weights, inputs=list(twin.trunk.parameters()), retain_graph=True)
        total.sum().backward(inputs=list(twin.heads.parameters()))
        for p, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None
            assert other.grad is not None
            distributed.all_reduce(other.grad)
            assert_close_to_reference(p.grad, other.grad / RANKS)
        model.zero_grad()
        twin.zero_grad()


def gauss_newton_is_refused(rank: int) -> None:
    """It would make different steps in each process."""
    model = nn.Linear(3, 1)
    with pytest.raises(UnsupportedError, match="`GaussNewton` solves the system of one process"):
        GaussNewton(Engine(model, distributed=True))
    wrapped, x = DistributedDataParallel(model), torch.randn(4 + rank, 3)
    optimizer = GaussNewton(Engine(wrapped))
    before = model.weight.detach().clone()
    with pytest.raises(UnsupportedError, match="Each process would make its own step"):
        optimizer.step(lambda: wrapped(x).squeeze(1))
    assert torch.equal(model.weight, before)


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    return {each.__name__: each for each in (gradients_are_averaged, gauss_newton_is_refused)}


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
