"""DistributedDataParallel: its hooks run, once, and the sum over ranks is left in `.grad`."""

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autogram import Engine, RankError
from autogram.testing import reference_jacobian
from tests.unit._distributed.worlds import (
    Routed,
    Tied,
    Waves,
    World,
    assert_close,
    assert_same_on_all,
    cnn,
    flat_gradient,
    images,
    mlp,
    tokens,
    two_of_each,
    weighting,
)
from tests.unit.checks import assert_close_to_reference
from tests.unit.processes import RANKS, Scenario

STEPS = 3
# Buckets of a few parameters, which leave before the pass has ended.
Wrap = partial(DistributedDataParallel, bucket_cap_mb=0.0002)


class Checkpointed(nn.Module):
    """Uses that are recorded in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


WORLDS = {
    "mlp": World(),
    "two losses each": World(losses=two_of_each),
    "images": World(cnn, images),
    "complex": World(Waves),
    "tied embedding": World(Tied, tokens),
    "checkpoint": World(Checkpointed),
    "ranks without objectives": World(sizes=[3, 0, 2, 4]),
}
WRAPS: dict[str, Callable[..., nn.Module]] = {
    "plain": Wrap,
    "that looks for unused": partial(Wrap, find_unused_parameters=True),
    "with views": partial(Wrap, gradient_as_bucket_view=True),
    "one bucket": DistributedDataParallel,
}


def series(world: World, wrap: Callable[[nn.Module], nn.Module], rank: int) -> None:
    """Steps in which the sizes of batches change."""
    del rank
    model, twin = world.model(), world.model()
    wrapped = wrap(model)
    engine = Engine(wrapped, distributed=True)
    for step in range(STEPS):
        assert_fused(engine, world, wrapped, twin, step)
    assert_fused(engine, world, wrapped, twin, STEPS, in_two_passes=True)


def assert_fused(
    engine: Engine,
    world: World,
    wrapped: nn.Module,
    twin: nn.Module,
    step: int,
    *,
    in_two_passes: bool = False,
) -> None:
    """One step. DDP wants a backward pass after each forward pass."""
    rank = distributed.get_rank()
    jacobian, counts = world.expected(twin, step)
    expected = jacobian @ jacobian.T
    weights = weighting(expected)
    own = weights.split(counts.tolist())[rank]
    wrapped.zero_grad()
    losses = world.losses(wrapped(world.batch(rank, step)))
    factor = 1.0
    if in_two_passes:
        gramian = engine.compute_gramian(losses)
        found = engine.own(weighting(gramian))
        losses.backward(found)
        factor = 1 / distributed.get_world_size()  # it averages, as ever
    else:
        found, gramian = engine.backward(losses, weighting, return_gramian=True)
    assert_close(gramian, expected)
    assert_close(found.flatten(), own)
    assert_close(flat_gradient(wrapped), jacobian.T @ weights * factor)
    assert_same_on_all(flat_gradient(wrapped))


def static_graph(rank: int) -> None:
    """Whose first step is fused, or in two passes."""
    for first_in_two_passes in (False, True):
        for world in (World(), World(Tied, tokens), World(Checkpointed)):
            model, twin = world.model(), world.model()
            wrapped = Wrap(model, static_graph=True)
            engine = Engine(wrapped, distributed=True, verify="always")
            for step in range(2 * STEPS):
                two = (step % 3 == 0) == first_in_two_passes and not isinstance(model, Checkpointed)
                assert_fused(engine, world, wrapped, twin, step, in_two_passes=two)
    del rank


def static_graph_and_a_gramian_alone(rank: int) -> None:
    """Behind the first forward pass, and then a fused step of the same."""
    world = World()
    model, twin = world.model(), world.model()
    wrapped = Wrap(model, static_graph=True)
    engine = Engine(wrapped, distributed=True)
    for step in range(STEPS):
        jacobian, _ = world.expected(twin, step)
        wrapped.zero_grad()
        losses = world.losses(wrapped(world.batch(rank, step)))
        gramian = engine.compute_gramian(losses)
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        engine.backward(losses, weighting)
        assert_close_to_reference(flat_gradient(wrapped), jacobian.T @ weighting(gramian))


def hooks_run_once(rank: int) -> None:
    """Those of DDP, with each bucket, and those of the user on parameters."""
    world = World()
    model = world.model()
    wrapped = Wrap(model)
    engine = Engine(wrapped, distributed=True)
    buckets: list[int] = []
    parameters: list[str] = []

    def exchange(_: Any, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.extend(id(p) for p in bucket.parameters())
        future = distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda found: found.value()[0] / RANKS)

    wrapped.register_comm_hook(None, exchange)
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: parameters.append(name))
    for step in range(STEPS):
        engine.backward(world.losses(wrapped(world.batch(rank, step))), weighting)
        assert sorted(buckets) == sorted(id(p) for p in model.parameters())
        assert sorted(parameters) == sorted(name for name, _ in model.named_parameters())
        buckets.clear()
        parameters.clear()


def parts_of_some_ranks(rank: int) -> None:
    """Which DDP is to look for; without that, zeros are given to it."""
    world = World(Routed)
    model, twin = world.model(), world.model()
    wrapped = Wrap(model, find_unused_parameters=True)
    engine = Engine(wrapped, distributed=True)
    for step in range(STEPS):
        assert_fused(engine, world, wrapped, twin, step)
        assert model.never.weight.grad is None
        assert model.odd.weight.grad is not None
    model.never.requires_grad_(False)
    twin.never.requires_grad_(False)
    wrapped = Wrap(model)
    for parameter in (*model.never.parameters(), *twin.never.parameters()):
        parameter.requires_grad_(False)
    engine = Engine(wrapped, distributed=True)
    for step in range(STEPS):
        x = world.batch(rank, step)
        wrapped.zero_grad()
        weights, gramian = engine.backward(world.losses(wrapped(x)), weighting, return_gramian=True)
        total = flat_gradient(wrapped)
        del weights, gramian
        losses = world.losses(twin(x))
        twin.zero_grad()
        losses.backward(engine.own(weighting(engine.compute_gramian(world.losses(model(x))))))
        expected = flat_gradient(twin)
        distributed.all_reduce(expected)
        assert_close_to_reference(total, expected)


def frozen_behind_the_forward_pass(rank: int) -> None:
    """On one rank: refused on all, and the next step is right."""
    world = World()
    model, twin = world.model(), world.model()
    wrapped = Wrap(model)
    engine = Engine(wrapped, distributed=True)
    for step in range(STEPS):
        losses = world.losses(wrapped(world.batch(rank, step)))
        model[0].bias.requires_grad_(rank == 0)
        for call in (engine.compute_gramian, partial(engine.backward, weighting=weighting)):
            with pytest.raises(
                RankError, match=r"frozen after the forward pass: `module\.0\.bias`"
            ):
                call(losses)
        model[0].bias.requires_grad_(True)
        losses.sum().backward()  # or the wrapper would still wait for it
        assert_fused(engine, world, wrapped, twin, step)


def samples_are_apart(rank: int) -> None:
    """What DDP puts behind the model to look for unused parameters hands cotangents on."""
    world = World(sizes=[4])
    wrapped = Wrap(world.model(), find_unused_parameters=True)
    engine = Engine(wrapped, distributed=True, verify="never")
    for step in range(STEPS):
        engine.backward(world.losses(wrapped(world.batch(rank, step))), weighting)
        assert engine._drivers.last.summary.samples > 1


def accumulation(wrap: Callable[[nn.Module], nn.Module], rank: int) -> None:
    """Micro-batches, with and without `no_sync` for all but the last: one sum."""
    world = World()
    for is_silent in (True, False):
        model, twin = world.model(), world.model()
        wrapped = wrap(model)
        engine = Engine(wrapped, distributed=True)
        for step in range(STEPS):
            batches = [
                [world.batch(other, 10 * step + i) for i in range(2)] for other in range(RANKS)
            ]
            rows = [
                reference_jacobian(world.losses(twin(x)), list(twin.parameters()))
                for batch in batches
                for x in batch
            ]
            jacobian = torch.cat(rows)
            expected = jacobian @ jacobian.T
            wrapped.zero_grad()
            with engine.accumulate(weighting) as batch:
                for i, x in enumerate(batches[rank]):
                    with wrapped.no_sync() if is_silent and i == 0 else nullcontext():
                        batch.add(world.losses(wrapped(x)))
            assert_close_to_reference(batch.gramian, expected)
            assert_close_to_reference(flat_gradient(wrapped), jacobian.T @ weighting(expected))
            assert_same_on_all(flat_gradient(wrapped))


def steps_without_exchange(rank: int) -> None:
    """Gradients of steps in `no_sync` are summed by the next step outside of it."""
    world = World()
    model, twin = world.model(), world.model()
    wrapped = Wrap(model)
    engine = Engine(wrapped, distributed=True)
    total = torch.zeros(())
    for step in range(STEPS):
        jacobian, _ = world.expected(twin, step)
        total = total + jacobian.T @ weighting(jacobian @ jacobian.T)
        with wrapped.no_sync() if step < STEPS - 1 else nullcontext():
            engine.backward(world.losses(wrapped(world.batch(rank, step))), weighting)
    assert_close_to_reference(flat_gradient(wrapped), total)


def a_head_that_is_not_the_engines(
    world: World, rank: int, form: Callable[[Tensor], Any] = lambda losses: losses
) -> None:
    """Inside of the wrapper, which sums its gradients as well, once for all micro-batches."""
    model, twin = world.model(), world.model()
    wrapped = Wrap(model)
    engine = Engine(model[:3], distributed=True)
    split = sum(p.numel() for p in model[:3].parameters())
    called: list[Tensor] = []
    model[4].weight.register_hook(called.append)
    for step in range(STEPS):
        jacobian, _ = world.expected(twin, step)
        part = jacobian[:, :split]
        wrapped.zero_grad()
        losses = form(world.losses(wrapped(world.batch(rank, step))))
        which = ("sum", "weighted")[step % 2]
        _, gramian = engine.backward(
            losses, weighting, gradients_outside=which, return_gramian=True
        )
        assert_close_to_reference(gramian, part @ part.T)
        weights = weighting(gramian)
        outside = weights if which == "weighted" else torch.ones_like(weights)
        expected = torch.cat([part.T @ weights, jacobian[:, split:].T @ outside])
        assert_close_to_reference(flat_gradient(wrapped), expected)
        assert len(called) == 1
        wrapped.zero_grad()
        with engine.accumulate(lambda found: torch.ones(len(found))) as batch:
            for i in range(2):
                with wrapped.no_sync() if i == step % 2 == 0 else nullcontext():
                    batch.add(form(world.losses(wrapped(world.batch(rank, step)))))
        assert_close_to_reference(flat_gradient(wrapped), 2 * jacobian.sum(0))
        assert_same_on_all(flat_gradient(wrapped))
        called.clear()


class _Dropped(torch.autograd.Function):
    """Adds what it gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        del ctx
        return x + shift

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradient, None


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = mlp(), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = _Dropped.apply(self.first(x), self.shift)
        return shifted


def a_parameter_without_a_gradient(rank: int) -> None:
    """It is not the engine's, and behind the losses, which give it nothing."""
    model, world = _Shifted(), World()
    wrapped = Wrap(model, find_unused_parameters=True)
    engine = Engine(model.first, distributed=True)
    for step in range(STEPS):
        jacobian, _ = world.expected(model.first, step)
        wrapped.zero_grad()
        losses = world.losses(wrapped(world.batch(rank, step)))
        gramian = engine.backward(losses, weighting, return_gramian=True)[1]
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        assert_close_to_reference(flat_gradient(model.first), jacobian.T @ weighting(gramian))
        assert model.shift.grad is None or not model.shift.grad.any()


def graphs_go_with_their_losses(rank: int) -> None:
    """Between micro-batches, as where there is one process."""
    world, model = World(), World().model()
    engine = Engine(model, distributed=True)
    alive = []
    gc.collect()
    gc.disable()
    with engine.accumulate(lambda found: torch.ones(len(found))) as batch:
        for step in range(STEPS):
            y = model(world.batch(rank, step))
            alive.append(weakref.ref(y.grad_fn))
            batch.add(world.losses(y))
            del y
            assert alive[-1]() is None
    gc.enable()


def a_trunk_with_a_plain_head(rank: int) -> None:
    """The head's gradients are summed by the engine, the trunk's by the wrapper."""
    world = World()
    model, twin = world.model(), world.model()
    trunk = Wrap(model[:3])
    whole = nn.Sequential(trunk, model[3:])
    engine = Engine(whole, distributed=True)
    for step in range(STEPS):
        assert_fused(engine, world, whole, twin, step)
    del rank


class Trainer(nn.Module):
    """Makes whole steps in its forward pass, as trainers do.

    Behind the pass, the wrapper is not to wait for another backward pass.
    """

    def __init__(self, model: nn.Module, losses: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.losses = model, losses
        self.unused = nn.Linear(2, 2)
        self.engine: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.engine.backward(self.losses(self.model(x)), weighting)
        DistributedDataParallel._active_ddp_module.require_backward_grad_sync = False
        return weights


def steps_inside_of_the_forward(rank: int) -> None:
    """Where the wrapper has not begun to wait for gradients."""
    world = World()
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        twin = world.model()
        trainer = Trainer(world.model(), world.losses)
        if not options:
            trainer.unused = nn.Identity()
        wrapped = Wrap(trainer, **options)
        trainer.engine = Engine(trainer.model, distributed=True)
        for step in range(STEPS):
            jacobian, _ = world.expected(twin, step)
            wrapped.zero_grad()
            wrapped(world.batch(rank, step))
            wrapped.require_backward_grad_sync = True
            expected = jacobian.T @ weighting(jacobian @ jacobian.T)
            assert_close_to_reference(flat_gradient(trainer.model), expected)
            assert_same_on_all(flat_gradient(trainer.model))


def a_rank_that_raises(rank: int) -> None:
    """The next step works."""
    world = World()
    model, twin = world.model(), world.model()
    wrapped = Wrap(model)
    engine = Engine(wrapped, distributed=True)
    for step in range(STEPS):
        losses = world.losses(wrapped(world.batch(rank, step)))
        with pytest.raises(RankError, match="on rank 1"):
            engine.backward(losses.detach() if rank else losses, weighting)
        assert_fused(engine, world, wrapped, twin, step)


def a_rank_that_does_not_call_the_wrapper(rank: int) -> None:
    """The others would wait for it. With an empty batch it goes along."""
    world = World()
    wrapped = Wrap(world.model())
    engine = Engine(wrapped, distributed=True)
    x = world.batch(0, 0)

    def fused() -> None:
        engine.backward(torch.zeros(0) if rank else world.losses(wrapped(x)), weighting)

    def accumulated() -> None:
        with engine.accumulate(weighting) as batch:
            if not rank:
                batch.add(world.losses(wrapped(x)))

    for step in (fused, accumulated):
        with pytest.raises(RankError, match=r"of rank 1 do not come from.*`model\(x") as error:
            step()
        assert error.value.ranks == [1]
    engine.backward(world.losses(wrapped(x[:0] if rank else x)), weighting)
    assert_same_on_all(flat_gradient(wrapped))


def another_group(rank: int) -> None:
    """The wrapper's sum would be that of others."""
    groups = [distributed.new_group([other]) for other in range(RANKS)]
    world = World()
    wrapped = DistributedDataParallel(world.model(), process_group=groups[rank])
    engine = Engine(wrapped, distributed=True)
    with pytest.raises(
        RankError, match=r"adds up the gradients of the ranks \[0\].*Pass its group"
    ):
        engine.backward(world.losses(wrapped(world.batch(rank, 0))), weighting)


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    found: dict[str, Scenario] = {}
    for name, world in WORLDS.items():
        for how, wrap in WRAPS.items():
            found[f"{name}, {how}"] = partial(series, world, wrap)
    for how, wrap in WRAPS.items():
        found[f"accumulation, {how}"] = partial(accumulation, wrap)
    head = a_head_that_is_not_the_engines
    found |= {
        "a head that is not the engine's": partial(head, World()),
        "a head that is not the engine's, ranks without objectives": partial(
            head, World(sizes=[3, 0, 2, 4])
        ),
        "a head that is not the engine's, two losses each": partial(
            head, World(losses=two_of_each)
        ),
        "a head that is not the engine's, losses in a list": partial(
            head, World(losses=two_of_each), form=lambda losses: list(losses.unbind(1))
        ),
    }
    for alone in (
        static_graph,
        static_graph_and_a_gramian_alone,
        hooks_run_once,
        parts_of_some_ranks,
        frozen_behind_the_forward_pass,
        samples_are_apart,
        steps_without_exchange,
        a_trunk_with_a_plain_head,
        a_parameter_without_a_gradient,
        graphs_go_with_their_losses,
        steps_inside_of_the_forward,
        a_rank_that_raises,
        a_rank_that_does_not_call_the_wrapper,
        another_group,
    ):
        found[alone.__name__] = alone
    return found


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
