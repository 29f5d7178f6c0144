"""Recordings: how long they live, and by what their samples are counted."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._capture.recording import Counting
from tests.unit.engines import batch, per_sample


class Hyper(nn.Module):
    """Makes the weight of a layer from parameters alone, so that no tap keeps the recording."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.head = nn.Parameter(torch.randn(3)), nn.Linear(3, 8)

    def forward(self) -> Tensor:
        made: Tensor = self.head(self.code).tanh().view(2, 4)
        return made


def test_a_pass_is_noted_as_long_as_its_graph_lives(without_collector: None) -> None:
    del without_collector
    model = Hyper()
    engine = Engine(model)
    for _ in range(3):
        weight = model()
        assert len(engine._channel.recordings) == 1
        engine.compute_gramian(per_sample(batch(5, 4) @ weight.T))
        del weight
        assert engine._channel.recordings == []


def test_places_are_tried_once() -> None:
    counting = Counting()
    inputs = ((6, 5), (), (8,), (8, 3))

    def count() -> Any:
        return counting.count(0, inputs)

    def learn(counted: Any, samples: int, *, are_apart: bool) -> bool:
        return counting.learn([SimpleNamespace(counted=counted)], samples, are_apart=are_apart)

    assert count().samples == 6
    assert counting.count(0, ((1, 5), (4,))).samples == 4
    assert counting.count(0, ((), (1,))).samples == 1
    assert not learn(count(), 7, are_apart=False)  # nothing has this size
    assert not learn(counting.count(0, ((6,), (1,))), 1, are_apart=False)
    assert learn(count(), 8, are_apart=False)
    assert count().samples == 8
    assert counting.count(1, inputs).samples == 6  # another module
    assert counting.count(0, ((6, 5), ())).samples == 6  # an optional input is missing
    assert not learn(count(), 8, are_apart=False)  # it has not helped
    assert count().samples == 6
    assert learn(count(), 8, are_apart=False)  # by the next input
    assert not learn(count(), 8, are_apart=True)
    assert not learn(count(), 8, are_apart=False)
    assert count().samples == 8  # it did help once
    assert learn(count(), 6, are_apart=True)
    assert not learn(count(), 8, are_apart=True)  # both were tried
    assert count().samples == 6
    assert learn(count(), 5, are_apart=True)  # the second dimension
    assert count().samples == 5
