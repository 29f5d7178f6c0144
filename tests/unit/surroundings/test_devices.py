"""Tensors on several devices."""

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Spread(nn.Module):
    """Two branches on two devices, which share a parameter of the first."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4, device=first)
        self.branches = nn.ModuleList(
            nn.Sequential(*(nn.Linear(4, 4, device=x) for _ in range(4))) for x in (first, second)
        )
        self.devices = first, second

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.shared.weight, self.shared.bias
        found = [
            branch(nn.functional.linear(x.to(device), weight.to(device), bias.to(device)).tanh())
            for branch, device in zip(self.branches, self.devices, strict=True)
        ]
        return found[0] + found[1].to(x.device)


@needs_a_gpu
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cuda", "cpu"),
        ("cpu", "cuda"),
        pytest.param(
            *("cuda:0", "cuda:1"),
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_model_on_two_devices(first: str, second: str) -> None:
    """Autograd has a thread for each, which arrive at the same time."""
    model = Spread(first, second)
    engine = Engine(model, batch_dim=0)
    parameters = list(model.parameters())
    for _ in range(7):
        losses = model(torch.randn(5, 4, device=first)).square().sum(1)
        jacobian = reference_jacobian(losses, parameters).cpu()
        assert_close_to_reference(engine.compute_gramian(losses).cpu(), jacobian @ jacobian.T)
        assert_close_to_reference(engine.jacobian(losses).dense().cpu(), jacobian)
        model.zero_grad()
        weights = engine.backward(losses, lambda gramian: gramian.mean(1))
        gradient = torch.cat([p.grad.flatten().cpu() for p in parameters if p.grad is not None])
        assert_close_to_reference(gradient, weights.cpu() @ jacobian)


@needs_a_gpu
def test_forward_pass_on_a_stream_of_its_own() -> None:
    """The backward pass runs there, too, and what it computes is waited for."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    engine = Engine(model, batch_dim=0)
    side, main = torch.Stream("cuda"), torch.accelerator.current_stream("cuda")
    for _ in range(8):
        x = torch.randn(5, 4, device="cuda")
        side.wait_stream(main)
        with side:
            y = model(x)
            y.register_hook(lambda g: torch.cuda._sleep(10**7) or g * 1)  # backward is late
        main.wait_stream(side)
        losses = y.square().sum(1)
        found = engine.compute_gramian(losses).clone()
        jacobian = reference_jacobian(losses, model.parameters())
        assert_close_to_reference(found, jacobian @ jacobian.T)
