"""Interrupts at each place of a call: nothing is left of it, and the next step is right."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.interrupts import ALL, CHANGING, Interrupt, state_of
from tests.unit.processes import Scenario, run_in_processes


class Inner(torch.autograd.Function):
    """The sine, by a pass inside of the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(context: Any, cotangent: Tensor) -> Tensor:
        with torch.enable_grad():
            x = context.saved_tensors[0].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(x.sin(), x, cotangent)
        return gradient


class Model(nn.Module):
    """A table that is read twice, a pass inside of the pass, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(5, 3), nn.Linear(3, 4)
        self.scale, self.last = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.table.weight[1]
        return self.last(Inner.apply(self.first(x)) * self.scale.exp())


def weighting(gramian: Tensor) -> Tensor:
    return gramian.diagonal().rsqrt()


def _accumulate(engine: Engine, losses: Tensor) -> None:
    with engine.accumulate(weighting) as batches:
        batches.add(losses)


CALLS: dict[str, Callable[[Engine, Tensor], object]] = {
    "a fused step": lambda engine, losses: engine.backward(losses, weighting),
    "a Gramian": lambda engine, losses: engine.compute_gramian(losses),
    "an accumulation": _accumulate,
    "a check": lambda engine, losses: engine.verify(losses),
    "a product": lambda engine, losses: engine.jacobian(losses).vjp(torch.ones(3)),
}


class Trial:
    """A model with hooks and gradients, whose calls are interrupted."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.ids = Model().double(), torch.arange(3)
        self.outside = torch.ones(3, dtype=torch.float64, requires_grad=True)  # no part of J
        self.model.first.weight.register_hook(lambda _: None)
        self.before = [torch.randn_like(p) for p in self.model.parameters()]
        jacobian = reference_jacobian(self.losses(), [*self.model.parameters()])
        self.gramian = jacobian @ jacobian.T
        gradient = jacobian.T @ weighting(self.gramian)
        sizes = [p.numel() for p in self.model.parameters()]
        self.added = [x.view_as(p) for x, p in zip(gradient.split(sizes), self.before, strict=True)]
        self.renew()

    def renew(self) -> None:
        """A new engine, to which all calls were made."""
        self.engine = Engine(self.model)
        for call in CALLS.values():
            call(self.engine, self.losses())
        self._reset()
        self.state = state_of(self.model)

    def losses(self) -> Tensor:
        return self.model(self.ids).square().sum(1) * self.outside

    def _reset(self) -> None:
        for parameter, gradient in zip(self.model.parameters(), self.before, strict=True):
            parameter.grad = gradient.clone()
        self.outside.grad = None

    def assert_nothing_is_left(self, where: str) -> None:
        """State is as it was, gradients as before or complete, and the next step is right."""
        state = state_of(self.model)
        different = [name for name in state if state[name] != self.state[name]]
        assert not different, (where, different)
        parts = zip(self.model.parameters(), self.before, self.added, strict=True)
        for parameter, before, added in parts:
            assert parameter.grad is not None, where
            if not torch.equal(parameter.grad, before):
                assert_close_to_reference(parameter.grad, before + added)
        self._reset()
        _, found = self.engine.backward(self.losses(), weighting, return_gramian=True)
        assert_close_to_reference(found, self.gramian)
        parts = zip(self.model.parameters(), self.before, self.added, strict=True)
        for parameter, before, added in parts:
            assert_close_to_reference(parameter.grad, before + added)
        self._reset()


def interrupt(name: str, files: Collection[str], every: int, *, is_new: bool = False) -> int:
    """Interrupts a call at some of its places, and returns how many it has."""
    trial = Trial()
    number = 0
    while True:
        if is_new:
            trial.engine.remove()
            trial.engine = Engine(trial.model)
            trial.state = state_of(trial.model)
        losses, block = trial.losses(), Interrupt(number, files)
        try:
            with block:
                CALLS[name](trial.engine, losses)
        except KeyboardInterrupt:
            trial.assert_nothing_is_left(block.where)
            number += every
        else:
            # An interrupt while a generator is closed ends there.
            trial.assert_nothing_is_left(block.where)
            if not block.where:
                return block.places
            number += every


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("name", CALLS)
def test_at_some_places(name: str) -> None:
    assert interrupt(name, CHANGING, 11) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_at_each_place_where_state_is_changed(name: str) -> None:
    assert interrupt(name, CHANGING, 1) > 100


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("is_new", [False, True], ids=["later call", "first call"])
@pytest.mark.parametrize("name", CALLS)
def test_anywhere(name: str, is_new: bool) -> None:
    assert interrupt(name, ALL, 23, is_new=is_new) > 1000


def signals(rank: int) -> None:
    """Real ones, of another thread."""
    del rank
    trial, draw, interrupted = Trial(), random.Random(0), 0
    for number in range(100):
        losses, call, has_ended = trial.losses(), [*CALLS.values()][number % len(CALLS)], False
        timer = threading.Timer(draw.uniform(0, 8e-3), os.kill, (os.getpid(), signal.SIGINT))
        # Python drops an interrupt that comes while it runs the callback of a weak reference.
        with suppress(KeyboardInterrupt):
            timer.start()
            call(trial.engine, losses)
            has_ended = True
            timer.join()
            time.sleep(1e-3)
        interrupted += not has_ended
        trial.assert_nothing_is_left(str(number))
    assert interrupted > 0


def scenarios() -> Mapping[str, Scenario]:
    return {"signals": signals}


def test_signals(tmp_path: Path) -> None:
    (said,) = run_in_processes(scenarios, tmp_path, 1)["signals"]
    assert not said, said
