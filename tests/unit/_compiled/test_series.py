"""Series of fused steps of compiled models, in which something changes from step to step."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import Block, compiled
from tests.unit._compiled.inside import shown_uses
from tests.unit.checks import assert_close_to_reference, trainable

pytestmark = pytest.mark.slow


def _squares(y: Tensor, count: int) -> Tensor:
    """A number of objectives for each sample, or a loss for each if it is 1."""
    found = y.square().mean(1).unflatten(1, (count, -1)).sum(2)
    return found.squeeze(1) if count == 1 else found


def _assert_step(engine: Engine, losses: Tensor, plain: Tensor, of: Sequence[Tensor]) -> None:
    """Assert that a fused step is that of plain autograd."""
    jacobian = reference_jacobian(plain.flatten(), of)
    weights = torch.linspace(0.5, 2.0, plain.numel()).to(plain)

    def weigh(gramian: Tensor) -> Tensor:
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        return weights

    for parameter in of:
        parameter.grad = None
    engine.backward(losses, weigh)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in of]
    assert_close_to_reference(torch.cat([x.flatten() for x in found]), jacobian.T @ weights)


def test_everything_changes() -> None:
    """Sizes, dropout, objectives, and what is frozen; and back again.

    Inductor draws other random numbers for dropout than PyTorch.
    """
    model = nn.Sequential(nn.Linear(3, 8), Block(8, dropout=0.5), nn.Linear(8, 6))
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model)
    settled = {"size": 4, "count": 1, "is_training": True, "frozen": -1}
    changes = [{"size": 6}, {"is_training": False}, {"count": 2}, {"frozen": 0}, {"frozen": 2}]
    steps = [settled, settled]
    for change in changes:
        steps += [{**settled, **change}] * 2 + [settled] * 2
    for number, step in enumerate(steps):
        model.train(bool(step["is_training"]))
        for i, layer in enumerate(model):
            layer.requires_grad_(i != step["frozen"])
        x = torch.randn(step["size"], 5, 3)
        torch.manual_seed(number)
        with engine.paused():
            plain = _squares(model(x), step["count"])
        torch.manual_seed(number)
        losses = _squares(run(x), step["count"])
        with shown_uses() as shown:
            _assert_step(engine, losses, plain, trainable(model))
        if number % 2:  # the second of two equal steps is contracted inside
            assert bool(shown) == (step["count"] > 1), step


class Token(nn.Module):
    """A token for each sample, places up to the length, and columns up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.places = nn.Parameter(torch.randn(9, 4))
        self.columns = nn.Parameter(torch.randn(4, 9))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        mixed = (x + self.places[1 : 1 + x.shape[1]]).mT @ x
        return self.last(mixed) + (x @ self.columns[:, : x.shape[1]]).sum((1, 2), True)


def test_views_of_open_sizes() -> None:
    """Parameters that are expanded or cut to a size of the batch, which differs from step to step.

    One of these begins within a larger tensor.
    """
    model = Token()
    whole = torch.randn(100)
    model.places = nn.Parameter(whole[5:41].view(9, 4))
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model)
    for samples, length in ((3, 2), (3, 2), (4, 2), (5, 3), (6, 4), (3, 2), (6, 4), (1, 1), (6, 4)):
        x = torch.randn(samples, length, 4)
        with engine.paused():
            plain = _squares(model(x), 1)
        _assert_step(engine, _squares(run(x), 1), plain, trainable(model))


class Further(nn.Module):
    """Tokens of each sample, and further ones, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, further: Tensor) -> Tensor:
        folded = self.first(further).flatten(0, 1).sin().unflatten(0, further.shape[:2])
        found: Tensor = self.last(torch.cat([self.first(x).tanh(), folded], 1))
        return found


@pytest.mark.parametrize("dynamic", [None, True])
def test_tensors_without_elements(dynamic: bool | None) -> None:
    """Nothing says where the samples would are in them."""
    model = Further()
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model, dynamic=dynamic)
    for count in (0, 0, 2, 0, 2):
        x, further = torch.randn(3, 2, 4), torch.randn(3, count, 4)
        with engine.paused():
            plain = _squares(model(x, further), 1)
        _assert_step(engine, _squares(run(x, further), 1), plain, trainable(model))


class Chosen(nn.Module):
    """A layer for some of the samples: how many depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        chosen = (x[:, 0, 0] > 0).nonzero().squeeze(1)
        found: Tensor = self.last(x.index_add(0, chosen, self.some(x[chosen])).tanh())
        return found


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_of_values() -> None:
    """Dynamo is told to take sizes that depend on values into the graph."""
    model = Chosen()
    engine = Engine(model, verify="never")
    run = compiled(model, fullgraph=True)
    for samples in (4, 4, 5, 6, 4):
        x = torch.randn(samples, 2, 3)
        with engine.paused():
            plain = _squares(model(x), 1)
        _assert_step(engine, _squares(run(x), 1), plain, trainable(model))
