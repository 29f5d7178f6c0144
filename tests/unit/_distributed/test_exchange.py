"""The order of what a rank does in an exchange, with others that are not there."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._distributed.exchange import Exchange
from autogram._distributed.group import Link
from autogram._distributed.plan import make_plan
from autogram._distributed.share import data_of
from autogram._jacobian.parts import Parts
from tests.unit.engines import per_sample


class Alone:
    """A group of two ranks, of which the other one sends zeros."""

    rank, size = 0, 2

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def pass_on(
        self, sent: Tensor, to: Sequence[int], received: Mapping[int, Tensor]
    ) -> list[object]:
        del sent, to
        self.events.append("begun")
        for buffer in received.values():
            buffer.zero_()
        return [SimpleNamespace(wait=lambda: self.events.append("waited"))]

    def add_up(self, tensor: Tensor) -> SimpleNamespace:
        del tensor
        return SimpleNamespace(wait=lambda: None)


def test_own_products_are_made_while_factors_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    data = data_of(Engine(model).jacobian(per_sample(model(torch.randn(3, 6))), keep="factors"))
    shares, events = [data.share] * 2, list[str]()
    products = Parts.products

    def noted(*args: object) -> Tensor:
        events.append("own")
        return products(*args)

    monkeypatch.setattr(Parts, "products", noted)
    plan = make_plan(shares, Link(1.0, 1.0), "ring")
    Exchange(Alone(events), shares, plan, torch.device("cpu"))(data)
    assert events == ["begun", "own", "waited"]
