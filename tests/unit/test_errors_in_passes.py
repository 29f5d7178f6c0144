"""Errors that come up in a backward pass are raised behind it: what others do at its end runs."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.utils.checkpoint import checkpoint

from autogram import Engine, MixedSamplesError, NonFiniteError
from autogram._capture.backward.assembly import Assembly
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
    with pytest.raises(NonFiniteError, match="infinite or not a number"):
        engine.compute_gramian(losses)
    callbacks.assert_all_ran()
    assert_works(engine, model, batch(4, 3))


@pytest.mark.parametrize("losses_of", EACH)
def test_callbacks_run_where_a_receiver_fails(
    losses_of: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error is; and no more of the pass is shown to it."""
    model = mlp()
    engine = Engine(model, batch_dim=0, verify="never")
    for _ in range(2):
        losses = losses_of(model(batch(4, 3)))
        assert_exact(engine, losses, model)
    callbacks = Callbacks()
    losses = losses_of(callbacks.watch(model(batch(4, 3))))
    failing = LookupError("of a rule")
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise failing

    with monkeypatch.context() as patched:
        patched.setattr(Assembly, "__call__", fail)
        with pytest.raises(LookupError) as caught:
            engine.compute_gramian(losses)
    assert caught.value is failing
    assert len(calls) == 1
    callbacks.assert_all_ran()
    assert_exact(engine, losses, model)


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
