"""Memory that runs out in one place: less is used from then on, everywhere, and nothing twice."""

import copy
import re
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, MemoryLimitError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, batch, mlp, per_sample
from tests.unit.faults import SHORTAGES, Fault, spread, weighting
from tests.unit.jacobians import assert_gradients_are_close
from tests.unit.networks import Sine

FIRST, THEN, LAST = 2**20, 2**17, 2**14  # limits in bytes
EACH_DEVICE = pytest.mark.parametrize("device", SHORTAGES)


class Various(nn.Module):
    """Rules, a derived tensor, the fallback, and parts of parameters that overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tables = nn.ParameterList([batch(6, 4), batch(6, 4)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.frequency = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.last = nn.Linear(4, 2)
        self.register_parameter("unused", nn.Parameter(torch.ones(2)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.normed(self.first(x).tanh())
        hidden = Sine.apply(hidden, self.frequency).tanh()
        for table in self.tables:
            hidden = F.linear(F.linear(hidden, table[:4]).tanh(), table[2:]).tanh()
        return self.last(hidden)


def limit_of(call: Callable[[], Any]) -> int:
    """The limit that a call begins with, which it says where there is never enough memory."""
    with Fault(SHORTAGES["CPU"], times=inf), pytest.raises(MemoryLimitError) as error:
        call()
    found = re.search(r"with a limit of ([\d,]+) bytes", str(error.value))
    assert found is not None
    return int(found[1].replace(",", ""))


def limit_of_engine(engine: Engine, model: nn.Module) -> int:
    """The same of an engine's next Gramian."""
    losses = per_sample(model(batch(4, 3)))
    return limit_of(lambda: engine.compute_gramian(losses))


def prepared(steps: int, **options: Any) -> tuple[nn.Module, nn.Module, Engine]:
    """A model after some steps, a twin of it, and its engine."""
    torch.manual_seed(0)
    model = Various()
    twin = copy.deepcopy(model)
    engine = Engine(model, memory_limit_bytes=FIRST, **options)
    for _ in range(steps):
        engine.backward(per_sample(model(batch(4, 3))), weighting)
    model.zero_grad()
    return model, twin, engine


@EACH_DEVICE
@pytest.mark.parametrize(
    ("steps", "verify"),
    [
        pytest.param(0, "first", id="first step"),
        pytest.param(4, "never", id="fifth step"),
    ],
)
def test_fused_step_is_tried_again(steps: int, verify: str, device: str) -> None:
    """In every part of it: the pass, uses without a rule, derived tensors, Gramians, gradients."""

    def prepare() -> Callable[[], Any]:
        model, _, engine = prepared(steps, verify=verify)
        return partial(engine.backward, per_sample(model(batch(4, 3))), weighting)

    for skipped in spread(prepare, 7):
        model, twin, engine = prepared(steps, verify=verify)
        x = batch(4, 3)
        losses, expected = per_sample(model(x)), per_sample(twin(x))
        jacobian = reference_jacobian(expected, list(twin.parameters()))
        with Fault(SHORTAGES[device], skipped) as fault:
            weights, gramian = engine.backward(losses, weighting, return_gramian=True)
        assert fault.failures == 1
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        expected.backward(weighting(jacobian @ jacobian.T))
        assert_close_to_reference(weights, weighting(jacobian @ jacobian.T))
        assert_gradients_are_close(model, twin)
        assert limit_of_engine(engine, model) == THEN


@EACH_DEVICE
@pytest.mark.parametrize("earlier", [2, 0], ids=["adding", "first"])
def test_gradients_are_added_once(earlier: int, device: str) -> None:
    """What was added before memory ran out is not added again; hooks run once for each gradient."""
    weights = torch.linspace(-1.0, 1.0, 4)

    def prepare() -> Callable[[], Any]:
        model, _, engine = prepared(1)
        jacobian = engine.jacobian(per_sample(model(batch(4, 3))), keep="factors")
        return partial(jacobian.accumulate_grad, weights)

    for skipped in spread(prepare, 4):
        model, twin, engine = prepared(1)
        calls: list[Tensor] = []
        model.first.bias.register_hook(calls.append)
        model.last.weight.register_post_accumulate_grad_hook(calls.append)
        for _ in range(earlier):
            x = batch(4, 3)
            engine.jacobian(per_sample(model(x))).accumulate_grad(weights)
            per_sample(twin(x)).backward(weights)
        calls.clear()
        x = batch(4, 3)
        jacobian = engine.jacobian(per_sample(model(x)), keep="factors")
        with Fault(SHORTAGES[device], skipped) as fault:
            jacobian.accumulate_grad(weights)
        assert fault.failures == 1
        per_sample(twin(x)).backward(weights)
        assert_gradients_are_close(model, twin)
        assert len(calls) == 2
        assert limit_of_engine(engine, model) == limit_of(jacobian.gramian) == THEN


def test_one_limit_for_an_engine_and_its_jacobians() -> None:
    """Memory runs out in one, and all have less from then on: those from before, too."""
    model, _, engine = prepared(0)
    other = Engine(model, memory_limit_bytes=FIRST)
    before = engine.jacobian(per_sample(model(batch(4, 3))))
    with Fault(SHORTAGES["CUDA"]):
        before.row_norms()
    after = engine.jacobian(per_sample(model(batch(4, 3))))
    assert limit_of_engine(engine, model) == THEN
    assert limit_of(before.gramian) == limit_of(after.gramian) == THEN
    losses = per_sample(model(batch(4, 3)))
    with Fault(SHORTAGES["CUDA"]):
        engine.compute_gramian(losses)
    assert limit_of_engine(engine, model) == LAST
    assert limit_of(before.gramian) == limit_of(after.gramian) == LAST
    assert limit_of_engine(other, model) == FIRST


def test_gradients_for_which_there_is_never_enough() -> None:
    """Tried twice, and not once more outside; no gradient is changed."""
    model, _, engine = prepared(0, verify="never")
    losses = per_sample(model(batch(4, 3)))
    jacobian = engine.jacobian(losses)
    for skipped in spread(lambda: partial(jacobian.accumulate_grad, torch.ones(4)), 6):
        model.zero_grad()
        with (
            Fault(SHORTAGES["CUDA"], skipped, times=inf) as fault,
            pytest.raises(MemoryLimitError, match=r"1,048,576 bytes.*again with 131,072"),
        ):
            jacobian.accumulate_grad(torch.ones(4))
        assert all(p.grad is None for p in model.parameters())
        assert fault.failures == 2
    assert limit_of_engine(engine, model) == limit_of(jacobian.gramian) == FIRST


def test_a_gramian_for_which_there_is_never_enough() -> None:

    def prepare() -> Callable[[], Any]:
        model, _, engine = prepared(0)
        return partial(engine.compute_gramian, per_sample(model(batch(4, 3))))

    for skipped in spread(prepare, 7):
        model, _, engine = prepared(0)
        losses = per_sample(model(batch(4, 3)))
        with (
            Fault(SHORTAGES["CUDA"], skipped, times=inf) as fault,
            pytest.raises(MemoryLimitError, match=r"1,048,576 bytes.*again with 131,072"),
        ):
            engine.compute_gramian(losses)
        # Behind a failure the pass goes on, where an operation of PyTorch's may fail, too; twice.
        assert 2 <= fault.failures <= 4
        assert_exact(engine, losses, model)


class Greedy(nn.Sequential):
    """Layers between which PyTorch's own operations need more memory than there is, once."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(*mlp())
        self.error = error
        self.is_due = False
        self.passes = 0

    def run(self, x: Tensor) -> Tensor:
        """The layers, of which each has a recording of its own, as no hook is a part of one."""
        first, between, last = self
        hidden = between(first(x))
        hidden.register_hook(self.count)
        return last(hidden)

    def count(self, gradient: Tensor) -> None:
        """Counts the passes, or stops one."""
        del gradient
        self.passes += 1
        if self.is_due:
            self.is_due = False
            raise self.error


@EACH_DEVICE
@pytest.mark.parametrize("retain_graph", [True, False])
def test_between_two_uses(device: str, retain_graph: bool) -> None:
    """The pass begins again if its graph is there; if not, the next step works, with less."""
    model = Greedy(SHORTAGES[device]())
    twin = copy.deepcopy(model)
    engine = Engine(model, memory_limit_bytes=FIRST, verify="never")
    x = batch(4, 3)
    for step in range(4):
        losses = per_sample(model.run(x))
        model.is_due = step == 2
        if step == 2 and not retain_graph:
            with pytest.raises(
                MemoryLimitError, match=r"frees the graph.*new forward pass.*131,072"
            ):
                engine.backward(losses, weighting)
        else:
            weights = engine.backward(losses, weighting, retain_graph=retain_graph)
            per_sample(twin(x)).backward(weights)
        assert limit_of_engine(engine, model) == (FIRST if step < 2 else THEN)
        assert_gradients_are_close(model, twin)


@EACH_DEVICE
def test_several_objectives_at_once(device: str) -> None:
    """Memory that runs out is no reason to take cotangents for such that cannot be batched."""
    model = Greedy(SHORTAGES[device]())
    engine = Engine(model, memory_limit_bytes=FIRST, verify="never")
    for _ in range(4):  # at the calls 1, 2 and 4, the samples are searched for
        engine.compute_gramian(model.run(batch(4, 3)))
    losses = model.run(batch(4, 3))
    model.is_due, model.passes = True, 0
    engine.compute_gramian(losses)
    assert model.passes == 2
    assert limit_of_engine(engine, model) == THEN
    assert_exact(engine, model.run(batch(4, 3)), model)
