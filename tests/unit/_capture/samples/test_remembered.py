"""How much is remembered."""

import pytest
import torch
from torch import nn

from autogram import Engine
from autogram._containers import Latest
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference


def test_more_passes_in_one_graph_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Latest.__init__, "__defaults__", (4,))
    model = nn.Linear(3, 4)
    engine = Engine(model)
    parts = [model(torch.randn(2, n, 3)).square().mean((1, 2)) for n in range(1, 12)]
    losses = torch.stack(parts).sum(0)
    jacobian = reference_jacobian(losses, model.parameters())
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
