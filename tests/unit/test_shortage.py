"""Memory that runs out in one place: less is used from then on, everywhere, and nothing twice."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, MemoryLimitError
from autogram._blocks import bundle, columns
from autogram._blocks.columns import Columns
from autogram._capture.backward import assembly
from autogram._capture.uses import FallbackUse
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, batch, mlp, per_sample
from tests.unit.jacobians import assert_gradients_are_close
from tests.unit.networks import Sine

FIRST, THEN, LAST = 2**18, 2**15, 2**12
ERRORS = [
    pytest.param(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), id="CUDA"),
    pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), id="CPU"),
]


class Various(nn.Module):
    """Rules, a derived tensor, the fallback, and columns that are no bundle's."""

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
        for table in self.tables:  # in parts that overlap
            hidden = F.linear(F.linear(hidden, table[:4]).tanh(), table[2:]).tanh()
        return self.last(hidden)


class Shortage:
    """Memory runs out in a function, some number of times, where its limit is above the most.

    Args:
        patch: Puts it in the place of the function.
        owner: What has the function.
        name: Its name there.
        error: What is raised.
        most: The limit with which there is enough memory.
        skipped: How many calls go well before.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        error: RuntimeError,
        most: int = THEN,
        skipped: int = 0,
    ) -> None:
        self.original = getattr(owner, name)
        self.error, self.most, self.skipped = error, most, skipped
        self.limits: list[int] = []
        self.has_failed = False
        patch.setattr(owner, name, lambda *args, **kwargs: self(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        limit = next(x for x in (*args, *kwargs.values()) if isinstance(x, int) and x >= LAST // 8)
        self.limits.append(limit)
        self.skipped -= 1
        if limit > self.most and self.skipped < 0:
            self.has_failed = True
            raise self.error
        return self.original(*args, **kwargs)


PLACES: dict[str, tuple[Any, str]] = {
    "a Gramian": (columns, "gram"),
    "a Gramian of a bundle": (bundle, "_gram_of_all"),
    "rows that are kept": (Columns, "keep"),
    "a fallback": (FallbackUse, "contributions"),
    "a derivation": (assembly, "pull_back"),
    "a weighted sum": (Columns, "weighted_sum"),
    "weighted sums of a bundle": (bundle, "_sums_of_all"),
}
# What is called once in a step cannot run out of memory at the second call.
CALLS = [(place, skipped) for place in PLACES for skipped in (0, 1)]
ONCE = {"a Gramian of a bundle", "a fallback", "a derivation", "weighted sums of a bundle"}
CALLS = [(place, skipped) for place, skipped in CALLS if not (skipped and place in ONCE)]
IN_GRAMIAN = ["a Gramian", "a Gramian of a bundle", "a fallback", "a derivation"]
IN_GRADIENTS = ["a weighted sum", "weighted sums of a bundle"]


def weighting(gramian: Tensor) -> Tensor:
    return gramian @ torch.arange(1.0, len(gramian) + 1).sin()


def limits_of(engine: Engine, *others: Any) -> set[int]:
    """What is allowed now, wherever it is looked up."""
    holders = (engine, engine._drivers.last, *others)
    return {holder._limit.elements for holder in holders} | {
        engine._drivers.last.summary.limit.elements
    }


def assert_step_is_exact(engine: Engine, model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """A fused step, and what plain autograd adds for the same weights."""
    losses = per_sample(twin(x))
    jacobian = reference_jacobian(losses, list(twin.parameters()))
    weights, gramian = engine.backward(per_sample(model(x)), weighting, return_gramian=True)
    assert_close_to_reference(gramian, jacobian @ jacobian.T)
    losses.backward(weighting(jacobian @ jacobian.T))
    assert_close_to_reference(weights, weighting(jacobian @ jacobian.T))
    assert_gradients_are_close(model, twin)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("step", [0, 3], ids=["first step", "fourth step"])
@pytest.mark.parametrize(("place", "skipped"), CALLS)
def test_fused_step_is_tried_again(
    place: str, skipped: int, step: int, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the pass frees the graph, and gradients of earlier steps are there already."""
    model = Various()
    twin = copy.deepcopy(model)
    engine = Engine(model, memory_limit_bytes=4 * FIRST)
    for _ in range(step):
        assert_step_is_exact(engine, model, twin, batch(4, 3))
    with monkeypatch.context() as patch:
        shortage = Shortage(patch, *PLACES[place], error, skipped=skipped)
        assert_step_is_exact(engine, model, twin, batch(4, 3))
        assert shortage.has_failed
        assert limits_of(engine) == {THEN}
        shortage.limits.clear()
        assert_step_is_exact(engine, model, twin, batch(4, 3))
        assert max(shortage.limits) <= THEN


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("first", [2, 0], ids=["adding", "first"])
@pytest.mark.parametrize(("place", "skipped"), [x for x in CALLS if x[0] in IN_GRADIENTS])
def test_gradients_are_added_once(
    place: str, skipped: int, first: int, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was added before memory ran out is not added again; hooks run once for each gradient."""
    model = Various()
    twin = copy.deepcopy(model)
    calls: list[Tensor] = []
    model.first.bias.register_hook(calls.append)
    model.last.weight.register_post_accumulate_grad_hook(calls.append)
    engine = Engine(model, memory_limit_bytes=4 * FIRST)
    weights = torch.linspace(-1.0, 1.0, 4)
    for _ in range(first):
        x = batch(4, 3)
        engine.jacobian(per_sample(model(x))).accumulate_grad(weights)
        per_sample(twin(x)).backward(weights)
    calls.clear()
    x = batch(4, 3)
    jacobian = engine.jacobian(per_sample(model(x)), keep="factors")
    with monkeypatch.context() as patch:
        shortage = Shortage(patch, *PLACES[place], error, skipped=skipped)
        jacobian.accumulate_grad(weights)
        assert shortage.has_failed
    per_sample(twin(x)).backward(weights)
    assert_gradients_are_close(model, twin)
    assert len(calls) == 2
    assert limits_of(engine, jacobian) == {THEN}


def test_one_limit_for_an_engine_and_its_jacobians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in one, and all have less from then on: those from before, too."""
    model = Various()
    engine = Engine(model, memory_limit_bytes=4 * FIRST)
    other = Engine(model, memory_limit_bytes=4 * FIRST)
    before = engine.jacobian(per_sample(model(batch(4, 3))))
    with monkeypatch.context() as patch:
        Shortage(patch, columns, "square_norms", ERRORS[0].values[0])
        before.row_norms()
    after = engine.jacobian(per_sample(model(batch(4, 3))))
    assert limits_of(engine, before, after) == {THEN}
    with monkeypatch.context() as patch:
        Shortage(patch, bundle, "_gram_of_all", ERRORS[0].values[0], most=LAST)
        engine.compute_gramian(per_sample(model(batch(4, 3))))
    assert limits_of(engine, before, after) == {LAST}
    assert limits_of(other) == {FIRST}


@pytest.mark.parametrize("place", [*IN_GRADIENTS])
def test_gradients_for_which_there_is_never_enough(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried twice, and not once more outside; what is there already is said."""
    model = Various()
    engine = Engine(model, memory_limit_bytes=4 * FIRST, verify="never")
    losses = per_sample(model(batch(4, 3)))
    jacobian = engine.jacobian(losses)
    attempts: tuple[tuple[Callable[..., Any], Any, Any], ...] = (
        (jacobian.accumulate_grad, torch.ones(4), None),
        (engine.backward, losses, weighting),
    )
    for attempt, *args in attempts:
        with monkeypatch.context() as patch:
            shortage = Shortage(patch, *PLACES[place], ERRORS[0].values[0], most=0)
            with pytest.raises(MemoryLimitError, match=r"1,048,576 bytes.*again with 131,072") as e:
                attempt(*[x for x in args if x is not None])
            assert "already: clear it" in e.value.__notes__[0]
            assert shortage.limits == [FIRST, THEN]
    assert limits_of(engine, jacobian) == {FIRST}


@pytest.mark.parametrize("place", IN_GRAMIAN)
def test_a_gramian_for_which_there_is_never_enough(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Various()
    engine = Engine(model, memory_limit_bytes=4 * FIRST)
    losses = per_sample(model(batch(4, 3)))
    with monkeypatch.context() as patch:
        shortage = Shortage(patch, *PLACES[place], ERRORS[0].values[0], most=0)
        with pytest.raises(MemoryLimitError, match=r"1,048,576 bytes.*again with 131,072"):
            engine.compute_gramian(losses)
        assert shortage.limits == [FIRST, THEN]
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


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("retain_graph", [True, False])
def test_between_two_uses(error: RuntimeError, retain_graph: bool) -> None:
    """The pass begins again if its graph is there; if not, the next step works, with less."""
    model = Greedy(error)
    twin = copy.deepcopy(model)
    engine = Engine(model, memory_limit_bytes=4 * FIRST, verify="never")
    x = batch(4, 3)
    for step in range(4):
        losses = per_sample(model.run(x))
        model.is_due = step == 2
        if step == 2 and not retain_graph:
            with pytest.raises(
                MemoryLimitError, match=r"frees the graph.*131,072.*new forward pass"
            ):
                engine.backward(losses, weighting)
        else:
            weights = engine.backward(losses, weighting, retain_graph=retain_graph)
            per_sample(twin(x)).backward(weights)
        assert limits_of(engine) == {FIRST if step < 2 else THEN}
        assert_gradients_are_close(model, twin)


@pytest.mark.parametrize("error", ERRORS)
def test_several_objectives_at_once(error: RuntimeError) -> None:
    """Memory that runs out is no reason to take cotangents for such that cannot be batched."""
    model = Greedy(error)
    engine = Engine(model, memory_limit_bytes=4 * FIRST, verify="never")
    for _ in range(4):  # at the calls 1, 2 and 4, the samples are looked for
        engine.compute_gramian(model.run(batch(4, 3)))
    losses = model.run(batch(4, 3))
    model.is_due, model.passes = True, 0
    engine.compute_gramian(losses)
    assert model.passes == 2
    assert limits_of(engine) == {THEN}
    assert_exact(engine, model.run(batch(4, 3)), model)
