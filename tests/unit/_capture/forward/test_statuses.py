"""Tensors whose status has changed since they were seen, or is not what their call suggests."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram._capture.forward.statuses import Statuses
from autogram._capture.forward.tapping import Tapping
from autogram._capture.recording import Channel
from tests.unit.checks import assert_gramian_is_exact
from tests.unit.engines import assert_exact, per_sample


class Detached(nn.Module):
    """Reads a derived tensor that was detached in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        derived = self.second.exp()
        derived.detach_()
        return F.linear(self.first(x), derived) + (x @ self.second)


class Initialized(nn.Module):
    """Changes tensors in place by calls that name the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(input=self.linear(x) + 0)
        return y + nn.init.constant_(torch.empty(3), 2.0)


@pytest.mark.cpu
def test_inputs_of_inference_mode() -> None:
    """Autograd saves none of them, but a call may save a copy that it has made."""
    layer, recurrent = nn.Linear(3, 3), nn.GRU(3, 3, batch_first=True)
    engine = Engine(layer, recurrent)
    with torch.inference_mode():
        x = torch.randn(5, 1, 3).expand(-1, 4, -1)
    losses = per_sample(layer(x) + recurrent(x)[0])
    assert_exact(engine, losses, layer, recurrent)


def test_detached() -> None:
    assert_gramian_is_exact(Detached, torch.randn(4, 3))


def test_changed_by_name() -> None:
    assert_gramian_is_exact(Initialized, torch.randn(4, 3))


def test_arguments_of_a_call() -> None:
    """Also in one list or tuple of arguments, as of `torch.cat`."""
    tensors = [torch.zeros(1) for _ in range(4)]
    statuses = Statuses(Tapping(Channel().begin()))
    found = statuses.read((tensors[0], [tensors[1], 1], 2, tensors[2], (tensors[3], None)))
    assert [id(x) for x, _ in found] == [id(x) for x in tensors]
