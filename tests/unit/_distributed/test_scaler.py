"""A gradient scaler on each rank: an overflow on one is a step that all of them skip."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autogram import Engine
from tests.unit._distributed.test_ddp import Wrap
from tests.unit._distributed.test_fsdp import Shardable, inner, nested
from tests.unit._distributed.worlds import (
    Routed,
    Tied,
    World,
    assert_close,
    assert_same_on_all,
    cnn,
    images,
    mlp,
    tokens,
    two_of_each,
)
from tests.unit.checks import assert_close_to_reference
from tests.unit.processes import RANKS, Scenario

pytestmark = pytest.mark.slow

SCALE = 2.0**10
GROWTH = 3  # the scale doubles after so many steps that are taken
# On which ranks each step overflows. Some shapes are new when they overflow, and the last are not.
COURSE = ({0}, set(), {1}, set(), set(), set(), {0, 1}, {1}, set(), {0}, set(), set())

Wrapping = Callable[[nn.Module], nn.Module]
Overflow = Callable[[Tensor], Tensor]
Losses = Callable[[int], Tensor]
Step = Callable[[Engine, nn.Module, Losses, Any], list[Tensor]]


def of_all(losses: Tensor) -> Tensor:
    """No objective is finite, so that none shows where samples are."""
    return losses * torch.inf


def of_one(losses: Tensor) -> Tensor:
    """The objectives of one sample."""
    return torch.cat([losses[:1] * torch.nan, losses[1:]])


def of_cotangents(losses: Tensor) -> Tensor:
    """The objectives are finite, and their gradients are not."""
    return losses + (losses - losses.detach()).abs().sqrt()


def weighting(gramian: Tensor) -> Tensor:
    """Different for each objective, and dependent on the size of the Gramian."""
    assert gramian.isfinite().all(), "called at a step that is skipped"
    return gramian.diagonal().rsqrt() * torch.arange(1, len(gramian) + 1)


def scaler_of(kind: type = torch.amp.GradScaler, scale: float = SCALE) -> Any:
    return kind("cpu", init_scale=scale, growth_interval=GROWTH)


def fused(engine: Engine, model: nn.Module, losses_of: Losses, scaler: Any) -> list[Tensor]:
    """One pass."""
    del model
    return [engine.backward(losses_of(0), weighting, scaler=scaler)]


def two_passes(engine: Engine, model: nn.Module, losses_of: Losses, scaler: Any) -> list[Tensor]:
    """Weights, and a backward pass of the user, whose gradients wrappers average."""
    losses = losses_of(0)
    weights = engine.weights(losses, weighting, scaler=scaler)
    scaler.scale(losses).backward(weights)
    for p in model.parameters():
        if isinstance(model, DistributedDataParallel) or isinstance(p, DTensor):
            p.grad *= RANKS
        else:
            distributed.all_reduce(p.grad)
    return [weights]


def micro_batches(engine: Engine, model: nn.Module, losses_of: Losses, scaler: Any) -> list[Tensor]:
    """Two of them, with one communication of wrappers."""
    is_silenced = isinstance(model, DistributedDataParallel)
    with engine.accumulate(weighting, scaler=scaler) as batches:
        with model.no_sync() if is_silenced else nullcontext():
            batches.add(losses_of(0))
        batches.add(losses_of(1))
    return batches.weights


# How many batches each takes, and which of them overflows.
STEPS: dict[str, tuple[Step, int, int]] = {
    "fused": (fused, 1, 0),
    "two passes": (two_passes, 1, 0),
    "first micro-batch": (micro_batches, 2, 0),
    "second micro-batch": (micro_batches, 2, 1),
}


def whole(x: Tensor) -> Tensor:
    """A tensor that may be spread over the ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def is_finite_here(x: Tensor) -> bool:
    """Whether all elements that this rank has are finite, if it has any."""
    own = x.to_local() if isinstance(x, DTensor) else x
    return own.numel() > 0 and bool(own.isfinite().all())


def values_of(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [whole(p).detach().clone() for p in model.parameters()]


def gradient_of(model: nn.Module) -> Tensor:
    """All gradients, with zeros where there is none."""
    found = [torch.zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([whole(x).flatten() for x in found])


def series(
    world: World,
    wrap: Wrapping,
    take: str,
    overflow: Overflow,
    rank: int,
    *,
    kind: type = torch.amp.GradScaler,
    way: Any = None,
) -> None:
    """A step that overflows changes nothing but the scale; others are those of plain autograd.

    Each of two optimizers looks at the gradients of its own parameters alone.
    """
    step, count, place = STEPS[take]
    model, twin = wrap(world.model()), world.model()
    engine = Engine(model, distributed=True, verify="always" if way else "first")
    engine._ranks.way = way
    scaler, scale, taken = scaler_of(kind), SCALE, 0
    parts = [list(model.parameters())[i::2] for i in range(2)]
    optimizers = [torch.optim.SGD(part, lr=1e-3) for part in parts]
    last = distributed.get_world_size() - 1
    for number, overflows in enumerate(COURSE):
        data = [10 * i + (number % 2 if number < 6 else 0) for i in range(count)]
        overflows = {r * last for r in overflows if len(world.batch(r * last, data[place]))}

        def losses_of(i: int, data: Any = data, overflows: Any = overflows) -> Tensor:
            losses = world.losses(model(world.batch(rank, data[i])))
            return overflow(losses) if rank in overflows and i == place else losses

        jacobian, weights = expected(world, twin, data)
        found = step(engine, model, losses_of, scaler)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        total, before = gradient_of(model) / scale, values_of(model)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert all(part.isnan().all() for part in found)
            assert len(gradients) == reached(jacobian, twin)
            assert not any(map(is_finite_here, gradients))
            assert all(map(torch.equal, values_of(model), before))
            scale, taken = scale / 2, 0
        else:
            own = weights[rank * count : (rank + 1) * count]
            for part, other in zip(found, own, strict=True):
                assert_close(part.flatten(), other)
            assert_close_to_reference(total, torch.cat(weights) @ jacobian)
            assert_same_on_all(total)
            assert not all(map(torch.equal, values_of(model), before))
            taken = (taken + 1) % GROWTH
            scale = scale if taken else scale * 2
        assert scaler.get_scale() == scale
        for p, value in zip(twin.parameters(), values_of(model), strict=True):
            p.data.copy_(value)
        for optimizer in optimizers:
            optimizer.zero_grad()


def expected(world: World, twin: nn.Module, data: list[int]) -> tuple[Tensor, list[Tensor]]:
    """J of all ranks' batches, rank after rank, and the weights of each batch."""
    found = [world.expected(twin, number) for number in data]
    batches = [rows.split(counts.tolist()) for rows, counts in found]
    parts = [part for of_rank in zip(*batches, strict=True) for part in of_rank]
    jacobian = torch.cat(parts)
    return jacobian, list(weighting(jacobian @ jacobian.T).split([len(part) for part in parts]))


def reached(jacobian: Tensor, twin: nn.Module) -> int:
    """How many parameters have a gradient."""
    parts = jacobian.split([p.numel() for p in twin.parameters()], 1)
    return sum(bool(part.any()) for part in parts)


def ranks_without_micro_batches(rank: int) -> None:
    """A scaler without losses has a scale, too."""
    world = World()
    for empty in range(RANKS):
        model, twin = world.model(), world.model()
        engine = Engine(model, distributed=True)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of()
        for factor in (torch.inf, 1.0, torch.nan, 1.0):
            rows, counts = world.expected(twin, 0)
            jacobian = rows.split(counts.tolist())[1 - empty]
            with engine.accumulate(weighting, scaler=scaler) as batches:
                if rank != empty:
                    batches.add(world.losses(model(world.batch(rank, 0))) * factor)
            if factor == 1:
                weights = weighting(jacobian @ jacobian.T)
                gradient = gradient_of(model) / scaler.get_scale()
                assert_close_to_reference(gradient, weights @ jacobian)
            before = values_of(model)
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, values_of(model), before)) == (factor != 1)
            for p, value in zip(twin.parameters(), values_of(model), strict=True):
                p.data.copy_(value)
            optimizer.zero_grad()
        assert scaler.get_scale() == SCALE / 4


def gramians_and_forms(rank: int) -> None:
    """The Gramian is that of the losses; weights have the form of the losses."""
    world = World()
    model = world.model()
    engine = Engine(model, distributed=True)
    for i, factor in enumerate((1.0, torch.inf, 1.0)):
        y = model(world.batch(rank, 0))
        losses = {"a": y.square().sum(1), "b": y.sin().sum(1)}
        gramian = engine.compute_gramian(losses)
        if rank == i % RANKS:
            losses["b"] = losses["b"] * factor
        found, other = engine.backward(losses, weighting, scaler=scaler_of(), return_gramian=True)
        assert list(found) == ["a", "b"]
        assert [x.shape for x in found.values()] == [x.shape for x in losses.values()]
        assert_same_on_all(other.nan_to_num(-1.0))
        if factor == 1:
            assert_close_to_reference(other, gramian)
        else:
            assert not other.isfinite().all()
            assert all(x.isnan().all() for x in found.values())


def nothing_is_agreed_on_twice(rank: int) -> None:
    """A step of known shapes that overflows is exchanged as any other, while the pass goes on."""
    world = World(sizes=[4])
    model = world.model()
    engine = Engine(model, distributed=True, verify="never")
    ranks = engine._ranks
    ranks.way = "rows"
    calls = []
    for step in range(8):
        before = ranks.agreement.calls
        factors = torch.ones(4)
        factors[rank] = torch.inf if (step, rank) in ((3, 1), (5, 0)) else 1.0
        losses = world.losses(model(world.batch(rank, 0))) * factors
        weights = engine.backward(losses, weighting, scaler=scaler_of())
        assert weights.isfinite().all() == (step not in (3, 5))
        calls.append(ranks.agreement.calls - before)
        assert ranks.early == (len(ranks.plan.buckets) if step else 0)
    assert len(set(calls[1:])) == 1
    assert ranks.repeated == 0
    plain = Engine(model, distributed=True, verify="never")
    for _ in range(2):
        before = plain._ranks.agreement.calls
        plain.backward(world.losses(model(world.batch(rank, 0))), lambda gramian: gramian[0])
    assert plain._ranks.agreement.calls - before == calls[1]


def inputs(rank: int) -> None:
    """Leaves that are no part of J: their gradients are not a number on each rank."""
    world = World()
    model = world.model()
    engine = Engine(model, distributed=True)
    for overflows in ({0}, set(), {1}):
        x = world.batch(rank, 0).requires_grad_()
        losses = world.losses(model(x))
        losses = of_all(losses) if rank in overflows else losses
        engine.backward(losses, weighting, scaler=scaler_of())
        if overflows:
            assert x.grad.isnan().all()
        else:
            again = x.detach().requires_grad_()
            (SCALE * world.losses(model(again))).sum().backward()
            assert_close_to_reference(x.grad, again.grad)


def half_precision(wrap: Wrapping, kind: type, dtype: Any, rank: int) -> None:
    """A network that overflows on one rank alone, because the scale is too large, and then learns.

    The other rank has losses that are so much smaller that they do not.
    """
    torch.manual_seed(0)
    model = wrap(mlp().float())
    factor = 1.0 if rank else 2.0**-10
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float32)
    engine = Engine(model, distributed=True)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), kind("cpu", 2.0**20)
    course, skipped = [], 0
    for _ in range(30):
        with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            losses = model(x).float().square().sum(1) * factor
        weights = engine.backward(losses, lambda g: g.new_ones(len(g)) / len(g), scaler=scaler)
        skipped += bool(weights.isnan().all())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        course.append(float(losses.detach().mean()))
    assert 0 < skipped < 15
    assert scaler.get_scale() == 2.0 ** (20 - skipped)
    assert course[0] == course[skipped] > 2 * course[-1]
    for value in values_of(model):
        assert value.isfinite().all()
        assert_same_on_all(value)
    assert_same_on_all(torch.tensor(skipped))


def plain(model: nn.Module) -> nn.Module:
    return model


WRAPS: dict[str, Wrapping] = {"plain": plain, "DDP": Wrap, "fully_shard": nested}
OTHER_WRAPS: dict[str, Wrapping] = {
    "DDP that looks for unused": partial(Wrap, find_unused_parameters=True),
    "DDP, static graph": partial(Wrap, static_graph=True),
    "fully_shard, always": partial(nested, reshard_after_forward=True),
}
WORLDS = {
    "two losses each": (World(losses=two_of_each), WRAPS),
    "images": (World(cnn, images), {"plain": plain}),
    "tied embedding": (World(Tied, tokens), {"plain": plain, "DDP": Wrap}),
    "tied shards": (World(Shardable, tokens), {"fully_shard": inner}),
    "parts of some ranks": (World(Routed), {"plain": plain}),
    "ranks without objectives": (World(sizes=[3, 0, 2, 4]), WRAPS),
}


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    found: dict[str, Scenario] = {}
    for (how, wrap), take in product(WRAPS.items(), STEPS):
        found[f"{how}, {take}"] = partial(series, World(), wrap, take, of_all)
    for (how, wrap), overflow in product(WRAPS.items(), (of_one, of_cotangents)):
        name = f"{how}, {overflow.__name__}"
        found[name] = partial(series, World(), wrap, "fused", overflow)
    for (how, wrap), take in product(OTHER_WRAPS.items(), ("fused", "two passes")):
        found[f"{how}, {take}"] = partial(series, World(), wrap, take, of_all)
    for name, (world, wraps) in WORLDS.items():
        for how, wrap in wraps.items():
            found[f"{name}, {how}"] = partial(series, world, wrap, "fused", of_all)
    for way, take in product(("rows", "ring"), ("fused", "second micro-batch")):
        found[f"{way}, {take}"] = partial(series, World(), plain, take, of_all, way=way)
    for take in ("fused", "two passes"):
        found[f"ShardedGradScaler, {take}"] = partial(
            series, World(), nested, take, of_all, kind=ShardedGradScaler
        )
    kinds = {"plain": torch.amp.GradScaler, "DDP": torch.amp.GradScaler}
    for how, kind in {**kinds, "fully_shard": ShardedGradScaler}.items():
        half = torch.float16
        found[f"half precision, {how}"] = partial(half_precision, WRAPS[how], kind, half)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    shards = partial(nested, mp_policy=policy)
    for kind in (torch.amp.GradScaler, ShardedGradScaler):
        name = f"shards in half precision, {kind.__name__}"
        found[name] = partial(half_precision, shards, kind, None)
    for alone in (
        ranks_without_micro_batches,
        gramians_and_forms,
        nothing_is_agreed_on_twice,
        inputs,
    ):
        found[alone.__name__] = alone
    return found


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
