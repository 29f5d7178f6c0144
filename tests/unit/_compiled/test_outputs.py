"""Outputs of compiled parts that share their memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from tests.unit._compiled.compiling import INNER, assert_steps, compiled

OUTPUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "a view and its base": lambda y: (y.view(-1, 2, 3), y),
    "a base and its view": lambda y: (y, y.view(-1, 2, 3)),
    "two views": lambda y: (y.view(-1, 2, 3), y.view(-1, 3, 2)),
    "slices": lambda y: (y[:, :2], y[:, 2:], y),
    "chunks": lambda y: y.chunk(2, 1),
    "chunks and their base": lambda y: (*y.chunk(2, 1), y),
    "twice the same": lambda y: (y, y),
}


class _Several(nn.Module):
    """A layer of which several results are given."""

    def __init__(self, outputs: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layer, self.outputs = nn.Linear(3, 6), outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.outputs(self.layer(x))


def _losses(outputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    losses = [i * y.square().flatten(1).sum(1) for i, y in enumerate(outputs, 1)]
    return torch.stack(losses).sum(0)


@pytest.mark.parametrize("name", OUTPUTS)
def test_views(name: str) -> None:
    model = _Several(OUTPUTS[name])
    engine = Engine(model, unseen="error")
    batches = [(torch.randn(n, 3),) for n in (4, 4, 5)]
    assert_steps(model, compiled(model), engine, batches, _losses)


@pytest.mark.parametrize("inner", INNER)
def test_without_an_engine(inner: str) -> None:
    """Gradients are those of the model that is not compiled."""
    model = _Several(OUTPUTS["a view and its base"])
    x = torch.randn(4, 3)
    expected, found = (
        torch.autograd.grad(_losses(run(x), x).sum(), model.layer.weight)
        for run in (model, compiled(model, inner))
    )
    assert torch.allclose(found[0], expected[0])
