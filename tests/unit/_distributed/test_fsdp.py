"""`fully_shard`: exact Gramians and gradients of sharded parameters, under their own names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from autogram import Engine, RankError, UnsupportedError
from autogram._distributed import ranks
from tests.unit._distributed.worlds import (
    Members,
    Products,
    Slices,
    Tied,
    World,
    assert_close,
    assert_same_on_all,
    assert_step,
    cnn,
    images,
    mlp,
    tokens,
    two_of_each,
    weighting,
)
from tests.unit.checks import assert_close_to_reference
from tests.unit.processes import RANKS, Scenario

pytestmark = pytest.mark.slow

STEPS = 3


class Checkpointed(nn.Module):
    """A part that runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, torch.tanh(self.first(x)), use_reentrant=False)


class Pair(nn.Module):
    """A part that is given two activations, of different shapes."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(6, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.wide(x) * self.narrow(y)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.inner = nn.Linear(6, 6), nn.Linear(6, 3), self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x), self.second(x))


class Shardable(Tied):
    """`fully_shard` takes no parameters without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7]))


def mesh() -> Any:
    return distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))


def whole(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh(), **options)


def nested(model: nn.Module, **options: Any) -> nn.Module:
    """Each part with parameters, and the rest."""
    for child in list(model.children()):
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def inner(model: nn.Module, **options: Any) -> nn.Module:
    """Parts whose parameters no others use, and the rest."""
    fully_shard(model.norm, mesh=mesh(), **options)
    fully_shard(model.middle, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def some(model: nn.Module, **options: Any) -> nn.Module:
    """The first part, and the rest."""
    fully_shard(next(model.children()), mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


WORLDS = {
    "mlp": World(),
    "two losses each": World(losses=two_of_each),
    "images": World(cnn, images),
    "checkpoint": World(Checkpointed),
    "ranks without objectives": World(sizes=[3, 0, 2, 4]),
    "products": World(Products),
    "products, two losses each": World(Products, losses=two_of_each),
    "changed slices": World(Slices),
    "two inputs": World(Pair),
    "a wrong guess on one rank": World(Members),
}
WRAPS: dict[str, Callable[..., nn.Module]] = {
    "whole": whole,
    "nested": nested,
    "nested, gathered once": partial(nested, reshard_after_forward=False),
    "nested, always resharded": partial(nested, reshard_after_forward=True),
    "some": some,
}


def gradient(model: nn.Module) -> Tensor:
    """All gradients, whole, with zeros where there is none."""
    found = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        if parameter.grad is None:
            found.append(torch.zeros(parameter.shape).flatten())
        else:
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements
            found.append(parameter.grad.full_tensor().flatten())
    return torch.cat(found)


def series(world: World, wrap: Callable[[nn.Module], nn.Module], verify: Any, rank: int) -> None:
    """Steps in which the sizes of batches change."""
    del rank
    model, twin = wrap(world.model()), world.model()
    engine = Engine(model, distributed=True, verify=verify)
    for step in range(STEPS):
        assert_step(engine, world, model, twin, step, gradient)
    names = engine.jacobian(world.losses(model(world.batch(0, 0)))).names
    assert names == [name for name, _ in twin.named_parameters()]


def in_two_passes(rank: int) -> None:
    """The backward pass is PyTorch's, which averages."""
    world = World()
    model, twin = nested(world.model()), world.model()
    engine = Engine(model, distributed=mesh())
    for step in range(STEPS):
        jacobian, _ = world.expected(twin, step)
        model.zero_grad()
        losses = world.losses(model(world.batch(rank, step)))
        gramian = engine.compute_gramian(losses)
        losses.backward(engine.own(weighting(gramian)))
        expected = jacobian.T @ weighting(jacobian @ jacobian.T) / RANKS
        assert_close_to_reference(gradient(model), expected)


def learning_goes_on(rank: int) -> None:
    """Steps of an optimizer, which changes the shards."""
    world = World()
    model, twin = nested(world.model()), world.model()
    engine = Engine(model, distributed=True)
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (model, twin)]
    for step in range(4):
        jacobian, _ = world.expected(twin, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        engine.backward(world.losses(model(world.batch(rank, step))), weighting)
        flat = jacobian.T @ weighting(jacobian @ jacobian.T)
        sizes = [p.numel() for p in twin.parameters()]
        for parameter, part in zip(twin.parameters(), flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        for optimizer in optimizers:
            optimizer.step()
    for sharded, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(sharded.full_tensor().detach(), expected.detach())


def mixed_precision(rank: int) -> None:
    """Whole parameters and activations in bfloat16, and gradients in the dtype of the shards."""
    world = World()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nested(world.model().float(), mp_policy=policy)
    twin = world.model().to(torch.bfloat16)
    engine = Engine(model, distributed=True, verify="always")
    for step in range(STEPS):
        x = world.batch(rank, step).float()
        model.zero_grad()
        losses = world.losses(model(x))
        weights, gramian = engine.backward(losses, weighting, return_gramian=True)
        assert gramian.dtype == torch.float32
        other = Engine(twin, verify="never")
        found = other.jacobian(world.losses(twin(x.bfloat16())))
        own = sum(world.sizes[(other_rank + step) % 4] for other_rank in range(rank))
        part = gramian[own : own + len(x), own : own + len(x)]
        assert (part - found.gramian()).abs().max() < 1e-2 * gramian.abs().max()
        expected = torch.cat([g.flatten() for g in found.vjp(weights).values()]).float()
        distributed.all_reduce(expected)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        assert (gradient(model) - expected).abs().max() < 1e-2 * expected.abs().max()
        other.remove()


def accumulation(rank: int) -> None:
    """Micro-batches, equally many on all ranks."""
    world = World()
    model, twin = nested(world.model()), world.model()
    engine = Engine(model, distributed=True)
    for step in range(STEPS):
        own = [world.batch(rank, 10 * step + i) for i in range(2)]
        first, counts = world.expected(twin, 10 * step)
        second, further = world.expected(twin, 10 * step + 1)
        parts = zip(first.split(counts.tolist()), second.split(further.tolist()), strict=True)
        jacobian = torch.cat([part for both in parts for part in both])
        model.zero_grad()
        with engine.accumulate(weighting) as batches:
            for x in own:
                batches.add(world.losses(model(x)))
        expected = jacobian @ jacobian.T
        assert_close_to_reference(batches.gramian, expected)
        assert_close_to_reference(gradient(model), jacobian.T @ weighting(expected))
        assert_same_on_all(gradient(model))


def different_numbers_of_passes(rank: int) -> None:
    """A rank that verifies makes more of them, and the others go along."""
    for checking in range(RANKS):
        world = World()
        model, twin = nested(world.model(), reshard_after_forward=True), world.model()
        verify = "always" if rank == checking else "never"
        engine = Engine(model, distributed=True, verify=verify)
        with patch.object(ranks, "_go_along", wraps=ranks._go_along) as along:
            for step in range(STEPS):
                assert_step(engine, world, model, twin, step, gradient)
        if rank != checking:
            assert along.call_count >= STEPS


def inputs_with_gradients(rank: int) -> None:
    """They take a further pass, which ranks without samples, or such inputs, make along."""
    for sizes, ranks_with in (([3, 2], (0, 1)), ([3, 0, 2, 4], (0, 1)), ([3, 2], (1,))):
        world = World(sizes=sizes)
        model, twin = nested(world.model(), reshard_after_forward=True), world.model()
        engine = Engine(model, distributed=True)
        for step in range(STEPS):
            jacobian, _ = world.expected(twin, step)
            x = world.batch(rank, step).requires_grad_(rank in ranks_with)
            model.zero_grad()
            losses = world.losses(model(x))
            if step == 0:
                weights = engine.backward(losses, weighting, gradients_outside="weighted")
            else:
                with engine.accumulate(weighting, gradients_outside="weighted") as batches:
                    batches.add(losses)
                (weights,) = batches.weights
            expected = jacobian.T @ weighting(jacobian @ jacobian.T)
            assert_close_to_reference(gradient(model), expected)
            if x.requires_grad and len(x):
                (of_inputs,) = torch.autograd.grad(world.losses(twin(x)), x, weights)
                assert_close_to_reference(x.grad, of_inputs)


def frozen_behind_the_forward_pass(rank: int) -> None:
    """A shard, for which whole tensors are in the graph: on all ranks, or on one."""
    for reshard_after_forward in (True, False):
        world = World()
        model, twin = world.model(), world.model()
        model = nested(model, reshard_after_forward=reshard_after_forward)
        engine = Engine(model, distributed=True)
        for step, ranks_with in enumerate(((0, 1), (1,))):
            losses = world.losses(model(world.batch(rank, step)))
            shard = engine._ranks.shards["0.bias"]
            shard.requires_grad_(rank not in ranks_with)
            with pytest.raises(RankError, match=r"frozen after the forward pass: `0\.bias`\."):
                engine.backward(losses, weighting)
            shard.requires_grad_(True)
            assert_step(engine, world, model, twin, step, gradient)


def products_of_each_rank(rank: int) -> None:
    """`jacobian` and `verify` are of this rank alone, and all ranks call them."""
    world = World()
    model, twin = nested(world.model(), reshard_after_forward=True), world.model()
    engine = Engine(model, distributed=True, verify="never")
    for step in range(STEPS):
        jacobian, counts = world.expected(twin, step)
        losses = world.losses(model(world.batch(rank, step)))
        engine.verify(losses)
        found = engine.jacobian(losses)
        assert_close_to_reference(found.dense(), jacobian.split(counts.tolist())[rank])
        with pytest.raises(UnsupportedError, match="`accumulate_grad` writes gradients of this"):
            found.accumulate_grad(torch.ones(len(losses)))


def a_rank_that_raises(rank: int) -> None:
    """Before its first pass, or in one: the others do not wait."""
    world = World()
    model, twin = nested(world.model(), reshard_after_forward=True), world.model()
    engine = Engine(model, distributed=True)

    def calls() -> list[Callable[[Tensor], object]]:
        return [
            engine.compute_gramian,
            lambda losses: engine.backward(losses, weighting),
            lambda losses: engine.weights(losses, weighting),
            engine.jacobian,
            engine.verify,
        ]

    for step, call in enumerate(calls()):
        losses = world.losses(model(world.batch(rank, step)))
        with pytest.raises(RankError, match=r"(?s)on rank 1.*do not require a gradient"):
            call(losses.detach() if rank else losses)
        with pytest.raises(RankError, match=r"(?s)on rank 0.*The losses are a str"):
            call(losses if rank else "losses")
        assert_step(engine, world, model, twin, step, gradient)
    losses = world.losses(model(world.batch(rank, 0)))
    with pytest.raises(RankError, match="on rank 1"), engine.accumulate(weighting) as batches:
        batches.add(losses.detach() if rank else losses)
    assert_step(engine, world, model, twin, 1, gradient)


def what_is_refused(rank: int) -> None:
    """With what to do instead."""
    world = World()
    model = world.model()
    engine = Engine(model, distributed=True)
    fully_shard(model, mesh=mesh())
    with pytest.raises(RankError, match=r"after the engine was made.*Call `fully_shard` first"):
        engine.compute_gramian(world.losses(model(world.batch(rank, 0))))
    engine.remove()
    with pytest.raises(UnsupportedError, match=r"if you use `fully_shard`"):
        Engine(model)
    with pytest.raises(UnsupportedError, match=r"around the engine's modules is sharded"):
        Engine(model[0], distributed=True)
    model = whole(world.model())
    engine = Engine(model, distributed=True)
    penalty = sum(p.square().sum() for p in model.parameters())
    losses = world.losses(model(world.batch(rank, 0))) + penalty.full_tensor()
    with pytest.raises(RankError, match=r"computed from parameters that are sharded"):
        engine.compute_gramian(losses)


class Scaled(nn.Module):
    """Returns its scale, as policies do, beside what the layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = mlp(), nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.scale.exp()


def parameters_returned_by_the_forward(rank: int) -> None:
    """What the losses make of them is past the forward, too."""
    world = World()
    model = Scaled()
    fully_shard(model, mesh=mesh())
    engine = Engine(model, distributed=True)
    y, scale = model(world.batch(rank, 0))
    with pytest.raises(RankError, match=r"The losses use `scale` where calls are not.*penalties"):
        engine.compute_gramian(world.losses(y) * scale)


def parameters_used_past_the_forward(rank: int) -> None:
    """While they are whole: one process alone would wait for the others."""
    world = World()
    model = world.model()
    fully_shard(model, mesh=mesh(), reshard_after_forward=False)
    engine = Engine(model, distributed=True)
    y = model(world.batch(rank, 0))
    losses = world.losses(y) + model[0].weight.square().sum()
    with pytest.raises(
        RankError, match=r"The losses use `0\.weight` where calls are not.*penalties"
    ):
        engine.compute_gramian(losses)


def samples_are_apart(rank: int) -> None:
    """What PyTorch puts around units hands cotangents on."""
    world = World(sizes=[4])
    model = nested(world.model())
    engine = Engine(model, distributed=True, verify="never")
    for step in range(STEPS):
        engine.backward(world.losses(model(world.batch(rank, step))), weighting)
        assert engine._drivers.last.summary.samples > 1
    model = nested(Pair())
    engine = Engine(model, distributed=True, verify="never")
    engine.backward(world.losses(model(world.batch(rank, 0))), weighting)
    assert engine._drivers.last.summary.samples > 1


def hooks_are_taken_off(rank: int) -> None:
    """And nothing is left."""
    world = World()
    model = nested(world.model())
    before = [len(m._forward_pre_hooks) for m in model.modules()]
    engine = Engine(model, distributed=True)
    engine.backward(world.losses(model(world.batch(rank, 0))), weighting)
    engine.remove()
    assert [len(m._forward_pre_hooks) for m in model.modules()] == before


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    found: dict[str, Scenario] = {}
    for name, world in WORLDS.items():
        for how, wrap in WRAPS.items():
            if name != "mlp" and how not in ("nested", "nested, always resharded"):
                continue
            verify = "always" if how == "nested" else "first"
            found[f"{name}, {how}"] = partial(series, world, wrap, verify)
    for wrap in (whole, inner):
        tied = partial(series, World(Shardable, tokens), wrap, "always")
        found[f"tied embedding, {wrap.__name__}"] = tied
    for alone in (
        in_two_passes,
        learning_goes_on,
        mixed_precision,
        accumulation,
        different_numbers_of_passes,
        inputs_with_gradients,
        frozen_behind_the_forward_pass,
        products_of_each_rank,
        a_rank_that_raises,
        what_is_refused,
        parameters_returned_by_the_forward,
        parameters_used_past_the_forward,
        samples_are_apart,
        hooks_are_taken_off,
    ):
        found[alone.__name__] = alone
    return found


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
