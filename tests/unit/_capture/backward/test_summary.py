"""What is recorded of passes for a report."""

import pytest

from autogram import Engine
from autogram._capture.backward.run import Summary
from tests.unit.engines import batch, mlp, per_sample


def test_nothing_is_recorded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    engine = Engine(model, verify="never")
    x = batch(5, 3)
    engine.compute_gramian(per_sample(model(x)))
    monkeypatch.setattr(Summary, "add", lambda *_: pytest.fail("recorded again"))
    engine.compute_gramian(per_sample(model(x)))
    assert engine.report().flops > 0
