"""The plans that a report shows are those that are carried out."""

from typing import Any

import pytest
from torch import Tensor, nn

from autogram import Engine
from autogram._blocks import Block, Bundles, Kernels, products
from autogram._blocks.plan import Plan
from tests.unit.engines import batch, per_sample


def test_plans_are_those_that_are_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report plans again, from shapes, and each parameter alone."""
    monkeypatch.setattr(Bundles, "add", lambda _, *found: [[columns] for columns in found])
    taken: list[Plan] = []
    find, find_rows = products.plans, products.rows_of_block

    def plans(*arguments: Any) -> tuple[Plan, ...]:
        found = find(*arguments)
        taken.append(found[0])
        return found

    def rows_of_block(block: Block, kernels: Kernels) -> Tensor | None:
        """Rows that are there need no plan. The report has the one for rows."""
        rows = find_rows(block, kernels)
        if rows is not None:
            taken.append(find("gram", [block], (), kernels)[0])
            assert taken[-1].method == "rows"
        return rows

    monkeypatch.setattr(products, "plans", plans)
    monkeypatch.setattr(products, "rows_of_block", rows_of_block)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(36, 3)
    )
    engine = Engine(model, memory_limit_bytes=4 * 200, verify="never")
    engine.compute_gramian(per_sample(model(batch(8, 2, 5, 5))))
    report = engine.report()
    assert sorted(plan.method for plan in taken) == sorted(of.plan for of in report.parameters)
    assert report.flops == sum(2 * plan.multiplications for plan in taken)
