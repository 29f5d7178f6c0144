"""Tensors on several devices: of a GPU beside the CPU's, without data where there is no GPU."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from autogram import Engine
from autogram._blocks import Block, Columns, Devices, Limit, Lookup, Region
from autogram._capture.samples.objectives import Objectives
from autogram._capture.tracked import track_derived, track_parameter
from autogram._jacobian.parts import JacobianPart
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="a PyTorch without CUDA indexes no tensor of a GPU, also without data",
)
def test_rows_of_some_objectives_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which objectives are asked for is known on the CPU."""

    def unique(x: Tensor, *, return_inverse: bool) -> tuple[Tensor, Tensor]:
        """As for distinct values: without data, these are not known."""
        assert return_inverse
        return x, torch.arange(len(x), device="cpu")

    monkeypatch.setattr(torch, "unique", unique)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with FakeTensorMode():
        losses, table = torch.empty(3, device="cuda"), torch.empty(5, 4, device="cuda")
        factors = torch.empty(1, 3, 5, device="cuda"), torch.empty(3, 4, device="cuda")
        indices = torch.zeros(3, 2, dtype=torch.long, device="cuda")
        cotangents = torch.empty(1, 3, 2, 4, device="cuda")
        for block in (Block("kbo,bi->kboi", factors), Lookup(indices, cotangents)):
            columns = Columns(Region.contiguous((5, 4)), Devices(Limit(2**40)).on("cuda"))
            columns.add(Region.contiguous((5, 4)), block)
            part = JacobianPart(Objectives(losses, 0), {table: columns})
            rows = part.rows(table, torch.tensor([2, 0], device="cpu"))
            assert rows is not None
            assert rows.shape == (2, 5, 4)
            assert rows.device.type == "cuda"


def test_cast_to_another_device_is_no_region_of_a_parameter() -> None:
    """Its rows are on that device, and are brought to the parameter's."""
    parameter = torch.zeros(3, requires_grad=True, device="cpu")
    whole = track_parameter(parameter)
    for dtype, device, has_region in (
        (torch.float16, "cpu", True),
        (torch.float16, "meta", False),
        (parameter.dtype, "meta", False),
    ):
        derived = parameter.to(device, dtype)
        found = track_derived(derived, [whole], None, is_cast=True)
        assert (found.region is not None) == has_region
        assert found.device == derived.device


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
