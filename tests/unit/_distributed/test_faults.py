"""What goes wrong on one rank is an error on all of them, and the next step works."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from autogram import (
    Engine,
    InvalidOperandError,
    InvalidOptionError,
    NonFiniteError,
    RankError,
    UnsupportedError,
)
from autogram._blocks import Columns
from autogram._engine.steps import Step
from autogram._jacobian import Jacobian
from autogram._weights import Weighting
from tests.unit._distributed import test_fsdp
from tests.unit._distributed.worlds import World, assert_step, flat_gradient, mlp, weighting
from tests.unit.engines import batch, per_sample
from tests.unit.processes import RANKS, Scenario, run_in_processes

pytestmark = pytest.mark.slow


def raises(rank: int, text: str) -> AbstractContextManager[pytest.ExceptionInfo[RankError]]:
    """An error of all ranks that names one."""
    return pytest.raises(RankError, match=rf"(?s)(on r|R)ank {rank}.*{text}")


def calls(engine: Engine) -> list[Callable[[Tensor], object]]:
    return [
        engine.compute_gramian,
        lambda losses: engine.backward(losses, weighting),
        lambda losses: engine.weights(losses, weighting),
    ]


def a_rank_that_raises(rank: int) -> None:
    """In its own pass, before anything is exchanged."""
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    assert_step(engine, world, model, twin, 0)
    for step, call in enumerate(calls(engine)):
        model.zero_grad()
        losses = world.losses(model(world.batch(rank, 1)))
        with raises(1, "all ranks raise this error.*do not require a gradient") as raised:
            call(losses.detach() if rank == 1 else losses)
        assert raised.value.ranks == [1]
        assert all(p.grad is None for p in model.parameters())
        assert_step(engine, world, model, twin, step + 2)


def a_rank_that_raises_in_a_block(rank: int) -> None:
    """Between micro-batches, by the engine or by the user's own code."""
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    for number in range(2):
        with raises(1, "ValueError: no more data"), engine.accumulate(weighting) as batches:
            for i in range(2):
                if rank == 1 and i == number:
                    raise ValueError("no more data")
                batches.add(world.losses(model(world.batch(rank, 0))))
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(InvalidOperandError, match="no error was raised"):
            _ = batches.weights
    assert_step(engine, world, model, twin, 1)


def all_ranks_raise(rank: int) -> None:
    """The first one is named."""
    del rank
    model = mlp()
    engine = Engine(model, distributed=True)
    with raises(0, r"and 1 other ranks.*do not require a gradient") as raised:
        engine.compute_gramian(torch.ones(3))
    assert raised.value.ranks == [0, 1]


def a_rank_that_raises_in_the_exchange(rank: int) -> None:
    """While the others wait for its rows or factors."""
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    own = {"rows": "slice", "ring": "cross_gram"}
    for way, method in own.items():
        engine._ranks.way = way
        engine._ranks._plans.clear()
        failing = 1 if way == "rows" else 0  # who contracts in a ring
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(Columns, method, _fail)
            for call in calls(engine):
                with raises(failing, "MemoryError: it is full"):
                    call(world.losses(model(world.batch(rank, 1))))
        assert_step(engine, world, model, twin, 2)


def _fail(*_: object) -> None:
    raise MemoryError("it is full")


def a_rank_that_raises_behind_the_weights(rank: int) -> None:
    """In Jᵀ w, for which the others would wait: whoever adds the gradients up."""
    world = World()
    mesh = distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    ways: list[tuple[Callable[..., Any], Callable[[nn.Module], Tensor]]] = [
        (lambda model: model, flat_gradient),
        (DistributedDataParallel, flat_gradient),
        (partial(fully_shard, mesh=mesh), test_fsdp.gradient),
    ]
    for wrap, gradient in ways:
        model, twin = world.model(), world.model()
        wrapped = wrap(model)
        engine = Engine(wrapped, distributed=True)
        step = 0
        for owner, method in ((Jacobian, "vjp"), (Step, "_wrapped_rest")):
            for failing in range(RANKS):
                wrapped.zero_grad()
                losses = world.losses(wrapped(world.batch(rank, step)))
                with pytest.MonkeyPatch.context() as patch:
                    if rank == failing:
                        patch.setattr(owner, method, _fail)
                    with raises(failing, "MemoryError: it is full") as raised:
                        engine.backward(losses, weighting)
                assert raised.value.ranks == [failing]
                assert all(p.grad is None for p in wrapped.parameters())
                step += 1
                assert_step(engine, world, wrapped, twin, step, gradient)


def a_weighting_that_raises(rank: int) -> None:
    """The first rank calls it, and no other."""
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)

    def fail(gramian: Tensor) -> Tensor:
        assert rank == 0
        raise ZeroDivisionError(f"of {len(gramian)}")

    wrong = {
        "ZeroDivisionError: of 8": fail,
        "The weighting returned the shape.*one weight for each": lambda gramian: gramian[:-1, 0],
        "The weighting returned a str": lambda _: "weights",
    }
    for text, function in wrong.items():
        for call in (engine.backward, engine.weights):
            with raises(0, text):
                call(world.losses(model(world.batch(rank, 0))), function)
    assert_step(engine, world, model, twin, 1)


def different_parameters(rank: int) -> None:
    """By number, by name, by shape, and by what is frozen."""

    def wider() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))

    def narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def longer() -> nn.Module:
        return nn.Sequential(*narrow(), nn.Linear(3, 3))

    def frozen() -> nn.Module:
        model = narrow()
        model[0].bias.requires_grad_(False)
        return model

    for other, text in (
        (wider, r"`0\.weight` has shape \(9, 6\).* on rank 1, and \(8, 6\).*Make the same model"),
        (longer, r"Rank 1 has `3\.weight`, `3\.bias` as well.*Make the same model"),
        (frozen, r"Rank 1 lacks `0\.bias`.*with the same parameters frozen"),
    ):
        model = narrow() if rank == 0 else other()
        engine = Engine(model, distributed=True)
        for call in calls(engine):
            for _ in range(2):
                with pytest.raises(RankError, match=rf"(?s){text}") as raised:
                    call(per_sample(model(batch(4, 6))))
                assert raised.value.ranks == [1]
    # What is frozen on one rank alone, and only for a while.
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    model[0].bias.requires_grad_(rank == 0)
    with raises(1, r"lacks `0\.bias`"):
        engine.compute_gramian(world.losses(model(world.batch(rank, 0))))
    model[0].bias.requires_grad_(True)
    assert_step(engine, world, model, twin, 1)


def objectives_that_depend_on_other_ranks(rank: int) -> None:
    """Refused before the first pass, in which the others would be waited for."""
    from torch.distributed.nn.functional import all_reduce

    world = World()
    model, twin = world.model(), world.model()
    for engine in (Engine(model, distributed=True), Engine(model, distributed=True, batch_dim=0)):
        for call in calls(engine):
            y = model(world.batch(rank, 0))
            with raises(0, r"through `_AllReduce`.*gather tensors without their gradients"):
                call(world.losses(all_reduce(y.sum()) * y))
        for call in calls(engine):
            y = model(world.batch(rank, 0))
            y = SyncBatchNorm.apply(y) if rank == 1 else y
            with raises(1, r"through `SyncBatchNorm`.*Use `nn\.GroupNorm`"):
                call(world.losses(y))
        assert_step(engine, world, model, twin, 1)
    local = Engine(twin)
    with pytest.raises(UnsupportedError, match="through `SyncBatchNorm`"):
        local.compute_gramian(world.losses(SyncBatchNorm.apply(twin(world.batch(rank, 0)))))


class SyncBatchNorm(torch.autograd.Function):
    """What PyTorch's own is to autograd, which runs on GPUs alone."""

    __module__ = "torch.nn.modules._functions"

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: object) -> Tensor:
        raise AssertionError("it would wait for the others")


def parameters_of_others(rank: int) -> None:
    """A head that is not the engine's: nobody would add up its gradients."""
    world = World()
    model, head = world.model(), nn.Linear(3, 3)
    engine = Engine(model, distributed=True)
    losses = per_sample(head(model(world.batch(rank, 0))))
    with raises(
        0, r"parameters of the shapes .*\(3, 3\).*that are not the engine's.*make two passes"
    ):
        engine.backward(losses, weighting)
    x = world.batch(rank, 0).requires_grad_()
    engine.backward(world.losses(model(x)), weighting)
    (expected,) = torch.autograd.grad(world.losses(model(x)).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def wrong_arguments(rank: int) -> None:
    model = mlp()
    for given in ("all", 2, [0, 1]):
        with pytest.raises(InvalidOptionError, match=r"`distributed` is .*Pass `True`"):
            Engine(model, distributed=given)
    mesh = distributed.device_mesh.DeviceMesh("cpu", [0])
    if rank == 1:
        expected = r"`distributed` has the processes \[0\], and this is 1. Pass a group"
        with pytest.raises(InvalidOptionError, match=expected):
            Engine(model, distributed=mesh)
    alone = Engine(model, distributed=False)
    assert alone.compute_gramian(per_sample(model(batch(4 + rank, 6)))).shape == 2 * (4 + rank,)
    engine = Engine(model, distributed=True)
    with pytest.raises(InvalidOperandError, match=r"the last Gramian had 0 objectives.*Pass one"):
        engine.own(torch.ones(3))
    engine.compute_gramian(per_sample(model(batch(4, 6))))
    with pytest.raises(InvalidOperandError, match=r"shape \(3,\).*had 8 objectives"):
        engine.own(torch.ones(3))
    losses = per_sample(model(batch(4, 6)))
    for call in (engine.backward, engine.weights):
        with raises(1, r"`scaler` is a float\. Pass the `torch\.amp\.GradScaler`"):
            call(losses, weighting, scaler=2.0 if rank else None)
        with raises(0, "The weighting is a Tensor"):
            call(losses, torch.ones(3))


def scalers_that_differ(rank: int) -> None:
    """In their scale, or there is none on some rank. Nothing is written, and the next step works.

    An overflow at the same time does not hide it.
    """
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)

    def accumulate(losses: Tensor, weighting: Weighting, scaler: Any) -> None:
        with engine.accumulate(weighting, scaler=scaler) as batches:
            batches.add(losses)

    small, large = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (0.75, 2.0**16))
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    for step, call in enumerate((engine.backward, engine.weights, accumulate)):
        model.zero_grad()
        for scalers, text in (
            ((small, large), r"the scale 0\.75 on rank 0, and the scale 65536 on rank 1"),
            ((small, None), r"the scale 0\.75 on rank 0, and no scale on rank 1"),
            ((disabled, large), "no scale on rank 0, and the scale 65536 on rank 1"),
        ):
            for factor in (1.0, torch.inf if rank and scalers[1] else 1.0):
                losses = world.losses(model(world.batch(rank, 0))) * factor
                with pytest.raises(RankError, match=f"{text}.*on all ranks") as raised:
                    call(losses, weighting, scaler=scalers[rank])
                assert raised.value.ranks == [1]
        assert all(p.grad is None for p in model.parameters())
        assert_step(engine, world, model, twin, step)


def errors_of_steps_with_a_scaler(rank: int) -> None:
    """Not taken for overflows: errors of the weighting, of the losses, and of a changed scale."""
    world = World()
    model, twin = world.model(), world.model()
    engine = Engine(model, distributed=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def fail(gramian: Tensor) -> Tensor:
        raise NonFiniteError(f"of the user, for {len(gramian)}")

    for step, call in enumerate((engine.backward, engine.weights)):
        model.zero_grad()
        with raises(0, "NonFiniteError: of the user, for 8"):
            call(world.losses(model(world.batch(rank, 0))), fail, scaler=scaler)
        losses = world.losses(model(world.batch(rank, 0))) * (torch.inf if rank == 0 else 1.0)
        with raises(1, "do not require a gradient"):
            call(losses.detach() if rank else losses, weighting, scaler=scaler)
        assert all(p.grad is None for p in model.parameters())
        assert_step(engine, world, model, twin, step)
    model.zero_grad()
    block = engine.accumulate(weighting, scaler=scaler)
    with raises(1, "scale has changed between the micro-batches"), block:
        for i in range(2):
            block.add(world.losses(model(world.batch(rank, 0))))
            if rank == 1 and i == 0:
                scaler.update(4.0)
    assert all(p.grad is None for p in model.parameters())
    assert_step(engine, world, model, twin, 3)


def tensor_parallelism(rank: int) -> None:
    """Refused, with what to do."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel()})
    with pytest.raises(UnsupportedError, match=r"(?s)sharded.*tensor parallelism"):
        Engine(model, distributed=True)
    del rank


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    found = (
        a_rank_that_raises,
        a_rank_that_raises_in_a_block,
        all_ranks_raise,
        a_rank_that_raises_in_the_exchange,
        a_rank_that_raises_behind_the_weights,
        a_weighting_that_raises,
        different_parameters,
        objectives_that_depend_on_other_ranks,
        parameters_of_others,
        wrong_arguments,
        scalers_that_differ,
        errors_of_steps_with_a_scaler,
        tensor_parallelism,
    )
    return {scenario.__name__: scenario for scenario in found}


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))


def deadly() -> Mapping[str, Scenario]:
    def dies(rank: int) -> None:
        model = mlp()
        engine = Engine(model, distributed=True)
        losses = per_sample(model(batch(4, 6)))
        engine.compute_gramian(losses)
        if rank == 1:
            os._exit(1)
        with pytest.raises(RuntimeError, match=r"(?i)gloo|connection|peer|timed out"):
            engine.compute_gramian(losses)
        raise AssertionError("the first rank has noticed")

    return {"dies": dies}


def test_a_rank_that_dies_is_no_hang(tmp_path: Path) -> None:
    """The group notices it, at the latest after its timeout."""
    first, second = run_in_processes(deadly, tmp_path, RANKS)["dies"]
    assert "the first rank has noticed" in first
    assert second == "did not end"


def test_without_a_group() -> None:
    with pytest.raises(InvalidOptionError, match=r"not in a group.*Call .*init_process_group"):
        Engine(mlp(), distributed=True)
    with pytest.raises(InvalidOperandError, match=r"of this process alone.*distributed=True"):
        Engine(mlp()).own(torch.ones(3))
