"""The plans that a report shows are those that are carried out."""

from typing import Any

import pytest
from torch import nn

from autogram import Engine
from autogram._blocks import Bundles, products
from autogram._blocks.plan import Plan
from tests.unit.engines import batch, per_sample


def test_plans_are_those_that_are_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report plans again, from shapes, and each parameter alone."""
    monkeypatch.setattr(Bundles, "add", lambda _, *found: [[columns] for columns in found])
    taken: list[Plan] = []
    find = products.plans

    def plans(*arguments: Any) -> tuple[Plan, ...]:
        found = find(*arguments)
        taken.append(found[0])
        return found

    monkeypatch.setattr(products, "plans", plans)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(36, 3)
    )
    engine = Engine(model, memory_limit_bytes=4 * 200)
    engine.compute_gramian(per_sample(model(batch(8, 2, 5, 5))))
    report = engine.report()
    assert sorted(plan.method for plan in taken) == sorted(of.plan for of in report.parameters)
    assert report.flops == sum(2 * plan.multiplications for plan in taken)
