"""Graphs are not searched for wrappers where there is one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autogram import Engine
from autogram._capture import distribution
from tests.unit.engines import batch, mlp, per_sample


def weighting(gramian: Tensor) -> Tensor:
    return gramian.diagonal()


def test_nothing_is_looked_at_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in most training, where it would cost time."""
    assert not torch.distributed.is_initialized()

    def fail(*_: Any) -> None:
        pytest.fail("it was looked at")

    for name in ("nodes_behind", "leaves_behind"):
        monkeypatch.setattr(distribution, name, fail)
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3)))
    engine.compute_gramian(losses)
    engine.jacobian(losses).accumulate_grad(torch.ones(4))
    engine.backward(losses, weighting)
