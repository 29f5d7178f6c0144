"""What compiled parts leave to other compilations, and what they find in PyTorch's caches."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._compiled.tracing.part import Part
from tests.unit._compiled.compiling import INNER, assert_step, assert_steps, compiled
from tests.unit.checks import trainable

_PROCESS = """
import json, sys
import torch
from torch import nn
from torch._dynamo.utils import counters
from autogram import Engine

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
engine = Engine(model, unseen="error")
run = torch.compile(model, backend="autogram")
x = torch.randn(4, 3, dtype=torch.float64)
for _ in range(2):  # the second step contracts inside
    losses = run(x).square().sum(1)
    gramian = engine.compute_gramian(losses)
    losses.sum().backward()
counts = {**counters["inductor"], **counters["aot_autograd"]}
print(json.dumps({"gramian": gramian.tolist(), **counts}))
"""


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _batches(*sizes: int) -> list[tuple[Tensor]]:
    return [(torch.randn(size, 3),) for size in sizes]


@pytest.mark.parametrize("inner", INNER)
def test_configuration_is_left_alone(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads compile with the same configuration, which lasts as long as the process."""
    names = ("donated_buffer", "enable_autograd_cache")
    expected = {name: getattr(torch._functorch.config, name) for name in names}
    seen: list[dict[str, Any]] = []
    trace = Part.trace

    def noted(self: Part, *args: Any) -> Any:
        seen.append({name: getattr(torch._functorch.config, name) for name in names})
        return trace(self, *args)

    monkeypatch.setattr(Part, "trace", noted)
    model = _mlp()
    engine = Engine(model, unseen="error")
    assert_steps(model, compiled(model, inner), engine, _batches(4), lambda y, _: y.square().sum(1))
    assert seen
    assert all(found == expected for found in seen)


class Attention(nn.Module):
    """Its saved tensors have memory that one backward pass could use for its results."""

    def __init__(self, *, has_parameters: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3) if has_parameters else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        found: Tensor = (x @ x.transpose(1, 2)).softmax(2) @ x
        return found


@pytest.mark.slow
@pytest.mark.parametrize("has_parameters", [True, False])
def test_same_graph_by_inductor(has_parameters: bool) -> None:
    """What inductor has in its caches for a graph overwrites what a second pass needs."""
    model = nn.Sequential(nn.Linear(3, 3), Attention(has_parameters=has_parameters))
    engine = Engine(model, unseen="error")
    x = torch.randn(4, 5, 3)

    def losses_of(part: Any) -> Tensor:
        found: Tensor = part(model[0](x)).square().sum((1, 2))
        return found

    for _ in range(2):  # kept in its cache, and found there
        part = torch.compile(model[1])
        with engine.paused():
            losses = losses_of(part)
        losses.sum().backward()
        with pytest.raises(RuntimeError, match="donated"), engine.paused():
            losses_of(part).sum().backward(retain_graph=True)
        torch._dynamo.reset()
    part = torch.compile(model[1], backend="autogram")
    losses_of(part).sum().backward()  # a pass that keeps nothing comes first
    for _ in range(2):
        with engine.paused():
            expected = losses_of(model[1])
        assert_step(engine, losses_of(part), expected, trainable(model))


@pytest.mark.slow
def test_second_process(tmp_path: Path) -> None:
    """It traces anew, and takes the kernels of all variants from inductor's cache."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, second = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", _PROCESS],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(2)
    )
    assert first["fxgraph_cache_miss"] == second["fxgraph_cache_hit"]
    assert second["fxgraph_cache_hit"] >= 3  # forward, Gramian, ordinary gradients
    assert "fxgraph_cache_hit" not in first
    assert "fxgraph_cache_miss" not in second
    assert second["autograd_cache_bypass"] == 1
    assert second["gramian"] == first["gramian"]
