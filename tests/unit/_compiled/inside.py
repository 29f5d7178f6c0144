"""What is contracted inside of compiled parts: models, and steps that are looked at."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram._capture.autograd.passes import Pass
from autogram._capture.uses import Use
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import (
    Decoder,
    Images,
    class_losses,
    language_losses,
    sequences,
)
from tests.unit.checks import assert_close_to_reference


@contextmanager
def shown_uses() -> Iterator[list[str]]:
    """Collects the functions of the uses whose cotangents leave a backward pass."""
    found: list[str] = []
    show = Pass.show

    def noted(self: Pass, call: Any, *rest: Any) -> None:
        if isinstance(call.args[0], Use):
            found.append(call.args[0].function)
        show(self, call, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pass, "show", noted)
        yield found


def assert_gramians(
    engine: Engine,
    losses: Callable[[], tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
    expected_shown: Sequence[str],
) -> None:
    """Assert that several steps are right, of which all but the first come from inside.

    Each step has a Gramian of its own and a fused step, on losses of their own.
    """
    for step in range(3):
        for is_fused in (False, True):
            own, plain = losses()
            jacobian = reference_jacobian(plain, parameters)
            with shown_uses() as shown:
                if is_fused:
                    assert_fused(engine, own, jacobian, parameters)
                else:
                    gramian = engine.compute_gramian(own)
                    assert_close_to_reference(gramian, jacobian @ jacobian.T)
            if step:
                assert sorted(shown) == sorted(expected_shown)


def assert_fused(
    engine: Engine, losses: Tensor, jacobian: Tensor, parameters: Sequence[Tensor]
) -> None:
    """Assert that a fused step has this Jacobian."""
    weights = torch.linspace(0.5, 2.0, len(losses)).to(losses)
    given: list[Tensor] = []
    for parameter in parameters:
        parameter.grad = None
    engine.backward(losses, lambda gramian: (given.append(gramian), weights)[1])
    assert_close_to_reference(given[0], jacobian @ jacobian.T)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    assert_close_to_reference(torch.cat([x.flatten() for x in found]), jacobian.T @ weights)


class Encoder(nn.Module):
    """Layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).mean(1))
        return found


class TiedByColumns(nn.Module):
    """A table of which each column belongs to a token, and which is a weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.tied = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        return (F.embedding(ids, self.alone.T) * self.tied.T[ids]).tanh() @ self.tied


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def squares(y: Tensor, _: Tensor) -> Tensor:
    return y.square().sum(1)


# What is not contracted inside: what is derived from a parameter, as rows of a table for positions.
MODELS: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "mlp": (mlp, lambda: (torch.randn(5, 3),), squares, []),
    "encoder": (Encoder, lambda: (torch.randn(4, 5, 8),), squares, []),
    "images": (Images, lambda: (torch.randn(6, 3, 8, 8),), class_losses, []),
    "decoder": (
        lambda: Decoder(layers=1),
        lambda: sequences(4, 6),
        language_losses,
        ["add"],
    ),
    "columns": (
        TiedByColumns,
        lambda: (torch.randint(6, (4, 5)),),
        lambda y, _: y.square().sum((1, 2)),
        [],
    ),
}
