"""Errors that come up in a backward pass are raised behind it: what others do at its end runs."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.utils.checkpoint import checkpoint

from autogram import Engine, MixedSamplesError
from autogram.rules import Recipe, product, register_rule, unregister_rule
from tests.unit.checks import features
from tests.unit.engines import assert_exact, assert_works, batch, mlp, per_sample

Losses = Callable[[Tensor], Tensor]

EACH = [
    pytest.param(per_sample, id="(B,)"),
    pytest.param(lambda output: features(output, 3), id="(B, K)"),
]


class Callbacks:
    """Queues a callback in each pass through a tensor, as distributed wrappers do."""

    def __init__(self) -> None:
        self.queued = self.run = 0

    def watch(self, tensor: Tensor) -> Tensor:
        tensor.register_hook(self._queue)
        return tensor

    def _queue(self, g: Tensor) -> None:
        del g
        self.queued += 1
        Variable._execution_engine.queue_callback(self._run)

    def _run(self) -> None:
        self.run += 1

    def assert_all_ran(self) -> None:
        assert self.queued > 0
        assert self.run == self.queued


class Routed(nn.Module):
    """An expert that sees some samples alone, in places that are measured each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        chosen = x[:, 0] > 0
        h = h.index_put((chosen.nonzero()[:, 0],), self.expert(h[chosen]))
        return self.last(h)


@pytest.mark.parametrize("losses_of", EACH)
@pytest.mark.parametrize("make", [mlp, Routed])
def test_callbacks_run_where_samples_are_looked_for(
    make: Callable[[], nn.Module], losses_of: Losses
) -> None:
    """At the first call, at other shapes, and at each call for irregular places."""
    model = make()
    engine = Engine(model, batch_dim=0)
    callbacks = Callbacks()
    for samples in (6, 6, 5, 6, 7):
        losses = callbacks.watch(losses_of(callbacks.watch(model(batch(samples, 3)))))
        assert_exact(engine, losses, model)
        callbacks.assert_all_ran()
        losses = callbacks.watch(losses_of(callbacks.watch(model(batch(samples, 3)))))
        engine.backward(losses, lambda gramian: gramian.diagonal())
        callbacks.assert_all_ran()
        model.zero_grad()


@pytest.mark.parametrize("losses_of", EACH)
def test_callbacks_run_where_samples_are_mixed(losses_of: Losses) -> None:
    model = mlp()
    engine = Engine(model, batch_dim=0)
    callbacks = Callbacks()
    for _ in range(2):  # it is found out, and known
        y = callbacks.watch(model(batch(4, 3)))
        with pytest.raises(MixedSamplesError, match="samples are mixed"):
            engine.compute_gramian(losses_of(y - y.mean(0)))
        callbacks.assert_all_ran()
    assert_works(engine, model, batch(4, 3))


@pytest.mark.parametrize("losses_of", EACH)
def test_callbacks_run_where_cotangents_are_not_finite(losses_of: Losses) -> None:
    model = mlp()
    engine = Engine(model, batch_dim=0, verify="never")
    callbacks = Callbacks()
    losses = (losses_of(callbacks.watch(model(batch(4, 3)))) * 0).sqrt()
    assert not engine.compute_gramian(losses).isfinite().any()
    callbacks.assert_all_ran()
    assert_works(engine, model, batch(4, 3))


class Scale(torch.autograd.Function):
    """A product, whose rule fails when blocks are made."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return input * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        return g * weight, (g * input).sum(0)


class Failing(nn.Module):
    """Scales between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scales = nn.ParameterList([torch.rand(4), torch.rand(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for scale in self.scales:
            x = Scale.apply(x, scale)
        return self.last(x.tanh())


@pytest.mark.parametrize("losses_of", EACH)
def test_callbacks_run_where_a_rule_fails(losses_of: Losses) -> None:
    """Whatever the error is; and no more of the pass is computed."""
    failures: list[LookupError] = []
    is_due = False

    def prepare(cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
        if is_due:
            failures.append(LookupError("of a rule"))
            raise failures[-1]
        return cotangent, input

    @register_rule(Scale)
    def scale(input: Tensor, weight: Tensor) -> list[Recipe]:
        return [product(weight, "ti,ti->i", input, prepare=prepare)]

    try:
        model = Failing()
        engine = Engine(model, batch_dim=0, verify="never")
        for _ in range(2):
            assert_exact(engine, losses_of(model(batch(4, 3))), model)
        callbacks = Callbacks()
        losses = losses_of(callbacks.watch(model(batch(4, 3))))
        is_due = True
        with pytest.raises(LookupError) as caught:
            engine.compute_gramian(losses)
        assert failures == [caught.value]
        callbacks.assert_all_ran()
        is_due = False
        assert_exact(engine, losses, model)
    finally:
        unregister_rule(Scale)


def test_errors_of_the_user_travel_as_they_do() -> None:
    """Through autograd, which stops at once."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    callbacks = Callbacks()
    failing = LookupError("of a hook")

    def fail(g: Tensor) -> None:
        del g
        raise failing

    y = model(batch(4, 3))
    losses = callbacks.watch(per_sample(y))
    handle = y.register_hook(fail)
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            engine.compute_gramian(losses)
        assert caught.value is failing
    assert callbacks.run == 0
    handle.remove()
    assert_exact(engine, losses, model)


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("error", [MixedSamplesError, None])
def test_nothing_is_kept_alive(error: type[Exception] | None) -> None:
    """By an error that was raised behind a pass, or one that was caught there."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    y = model(batch(4, 3))
    losses = per_sample(y - y.mean(0) if error else y)
    reference = weakref.ref(y)
    if error:
        with pytest.raises(error):
            engine.compute_gramian(losses)
    else:
        engine.compute_gramian(losses)
    del y, losses
    assert reference() is None


def test_checkpoints_are_run_again_in_passes_that_fail() -> None:
    """The pass goes on behind the error, through what is computed again."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(mlp(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x

    model = Model()
    engine = Engine(model, batch_dim=0)
    callbacks = Callbacks()
    for _ in range(2):
        losses = per_sample(callbacks.watch(model(batch(4, 3))))
        assert_exact(engine, losses, model)
    callbacks.assert_all_ran()
