"""Wrappers that spread a model over processes: exact, or refused by name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autogram import Engine, UnsupportedError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, batch, mlp, per_sample
from tests.unit.processes import RANKS, Scenario, run_in_two_processes

STEPS = 3
Wrap = Callable[[nn.Module], nn.Module]
Steps = Iterator[tuple[Tensor, Tensor, Tensor]]


def inputs(rank: int, step: int) -> Tensor:
    """The part of a batch that a process has."""
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    return torch.randn(4, 3, generator=generator)


def weighting(gramian: Tensor) -> Tensor:
    return gramian @ torch.linspace(0.5, 2.0, len(gramian))


def make_model() -> nn.Sequential:
    """The same in all processes."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


class Expected:
    """What plain autograd gives for a model, in one process and on average."""

    def __init__(self, model: nn.Module, rank: int, step: int) -> None:
        parameters = list(model.parameters())
        self.gradients = []
        for other in range(RANKS):
            losses = per_sample(model(inputs(other, step)))
            jacobian = reference_jacobian(losses, parameters)
            gramian = jacobian @ jacobian.T
            self.gradients.append(jacobian.T @ weighting(gramian))
            if other == rank:
                self.gramian, self.jacobian = gramian, jacobian
        self.own, self.mean = self.gradients[rank], sum(self.gradients) / RANKS


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@contextmanager
def refused(text: str) -> Iterator[None]:
    """Asserts that something is refused, by an error that says what to do."""
    with pytest.raises(
        UnsupportedError, match=rf"(?s){text}.*(compute_gramian|static_graph=False)"
    ):
        yield


# Which module is given to the engine, and when


def engine_of_wrapper(wrap: Wrap) -> tuple[Engine, nn.Module]:
    wrapped = wrap(make_model())
    return Engine(wrapped), wrapped


def engine_of_inner(wrap: Wrap) -> tuple[Engine, nn.Module]:
    model = make_model()
    wrapped = wrap(model)
    return Engine(model), wrapped


def engine_from_before(wrap: Wrap) -> tuple[Engine, nn.Module]:
    model = make_model()
    engine = Engine(model)
    return engine, wrap(model)


def engine_of_layers(wrap: Wrap) -> tuple[Engine, nn.Module]:
    model = make_model()
    wrapped = wrap(model)
    return Engine(*[layer for layer in model if isinstance(layer, nn.Linear)]), wrapped


def engine_around(wrap: Wrap) -> tuple[Engine, nn.Module]:
    outer = nn.Sequential(wrap(make_model()))
    return Engine(outer), outer


PLACES = {
    "of the wrapper": engine_of_wrapper,
    "of the model": engine_of_inner,
    "from before": engine_from_before,
    "of its layers": engine_of_layers,
    "around": engine_around,
}
Place = Callable[[Wrap], tuple[Engine, nn.Module]]

WRAPPERS: dict[str, Wrap] = {
    "DDP": DistributedDataParallel,
    "DDP that looks for unused": partial(DistributedDataParallel, find_unused_parameters=True),
    "DDP with views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
}


def two_passes(wrap: Wrap, place: Place, rank: int) -> None:
    """Exact: the Gramian of each process, and gradients that are exchanged."""
    engine, wrapped = place(wrap)
    twin = make_model()
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        wrapped.zero_grad()
        losses = per_sample(wrapped(inputs(rank, step)))
        gramian = engine.compute_gramian(losses)
        assert_close_to_reference(gramian, expected.gramian)
        losses.backward(weighting(gramian))
        assert_close_to_reference(gradient(wrapped), expected.mean)


def products(wrap: Wrap, place: Place, rank: int) -> None:
    """Exact, as they write nothing."""
    engine, wrapped = place(wrap)
    twin = make_model()
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        losses = per_sample(wrapped(inputs(rank, step)))
        jacobian = engine.jacobian(losses)
        assert_close_to_reference(jacobian.gramian(), expected.gramian)
        assert_close_to_reference(jacobian.dense(), expected.jacobian)
        found = jacobian.vjp(weighting(expected.gramian)).values()
        assert_close_to_reference(torch.cat([x.flatten() for x in found]), expected.own)


def gradients(wrap: Wrap, place: Place, rank: int) -> None:
    """Refused, before anything is written; the two passes work on the same losses."""
    engine, wrapped = place(wrap)
    twin = make_model()
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        wrapped.zero_grad()
        losses = per_sample(wrapped(inputs(rank, step)))
        with refused(r"`engine\.backward` writes gradients of this process alone"):
            engine.backward(losses, weighting)
        with refused(r"`engine\.clip` writes gradients of this process alone"):
            engine.clip(losses, 1.0)
        jacobian = engine.jacobian(losses)
        with refused("`accumulate_grad` writes gradients of this process alone"):
            jacobian.accumulate_grad(torch.ones(4))
        assert all(p.grad is None for p in wrapped.parameters())
        losses.backward(weighting(engine.compute_gramian(losses)))
        assert_close_to_reference(gradient(wrapped), expected.mean)


def without_exchange(wrap: Wrap, place: Place, rank: int) -> None:
    """Several fused steps inside of `no_sync`, and one by two passes outside of it: all exact."""
    engine, wrapped = place(wrap)
    inner = wrapped if hasattr(wrapped, "no_sync") else wrapped[0]
    twin = make_model()
    own, total = torch.zeros(()), torch.zeros(())
    with inner.no_sync():
        for step in range(STEPS):
            expected = Expected(twin, rank, step)
            losses = per_sample(wrapped(inputs(rank, step)))
            if step == 1:
                engine.jacobian(losses).accumulate_grad(weighting(expected.gramian))
            else:
                weights, gramian = engine.backward(losses, weighting, return_gramian=True)
                assert_close_to_reference(gramian, expected.gramian)
                assert_close_to_reference(weights, weighting(expected.gramian))
            own, total = own + expected.own, total + expected.mean
            assert_close_to_reference(gradient(wrapped), own)
    expected = Expected(twin, rank, STEPS)
    losses = per_sample(wrapped(inputs(rank, STEPS)))
    losses.backward(weighting(engine.compute_gramian(losses)))
    assert_close_to_reference(gradient(wrapped), total + expected.mean)


def past_the_wrapper(rank: int) -> None:
    """The model itself is called, where an ordinary pass exchanges nothing either."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    engine = Engine(model)
    twin = make_model()
    per_sample(wrapped(inputs(rank, 9))).sum().backward()
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        model.zero_grad()
        engine.backward(per_sample(model(inputs(rank, step))), weighting)
        assert_close_to_reference(gradient(model), expected.own)


def a_group_and_no_wrapper(rank: int) -> None:
    """Exact: what the processes do with their gradients is their own affair."""
    model, twin = make_model(), make_model()
    engine = Engine(model)
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        model.zero_grad()
        engine.backward(per_sample(model(inputs(rank, step))), weighting)
        assert_close_to_reference(gradient(model), expected.own)


def a_group_of_one(rank: int) -> None:
    """A wrapper with nobody to exchange gradients with."""
    groups = [torch.distributed.new_group([other]) for other in range(RANKS)]
    model, twin = make_model(), make_model()
    wrapped = DistributedDataParallel(model, process_group=groups[rank])
    engine = Engine(model)
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        model.zero_grad()
        engine.backward(per_sample(wrapped(inputs(rank, step))), weighting)
        assert_close_to_reference(gradient(model), expected.own)


def checkpoints(rank: int) -> None:
    """Uses that are recorded in the backward pass belong to the wrapper's forward, too."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layers, x, use_reentrant=False)

    model = Checkpointed()
    wrapped = DistributedDataParallel(model)
    engine = Engine(model)
    twin = make_model()
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        model.zero_grad()
        losses = per_sample(wrapped(inputs(rank, step)))
        with refused(r"`engine\.backward` writes"):
            engine.backward(losses, weighting)
        gramian = engine.compute_gramian(losses)
        assert_close_to_reference(gramian, expected.gramian)
        losses.backward(weighting(gramian))
        assert_close_to_reference(gradient(model), expected.mean)


def losses_of_two_forwards(rank: int) -> None:
    """One by the wrapper and one past it: the wrapper would exchange gradients."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    engine = Engine(model)
    plain = per_sample(model(inputs(rank, 0)))
    losses = per_sample(wrapped(inputs(rank, 1)))
    with refused(r"`engine\.backward` writes"):
        engine.backward(plain + losses, weighting)
    engine.backward(plain, weighting)  # though the other forward is alive
    assert_close_to_reference(gradient(model), Expected(make_model(), rank, 0).own)


# Static graphs


def static_graphs(place: Place, rank: int) -> None:
    """Refused in the first step, which the wrapper learns from; as without it in later ones."""
    engine, wrapped = place(partial(DistributedDataParallel, static_graph=True))
    twin = make_model()
    losses = per_sample(wrapped(inputs(rank, 0)))
    for call in (
        engine.compute_gramian,
        engine.jacobian,
        engine.verify,
        lambda losses: engine.backward(losses, weighting),
    ):
        with refused("`static_graph=True`"):
            call(losses)
    expected = Expected(twin, rank, 0)
    losses.backward(weighting(expected.gramian))
    assert_close_to_reference(gradient(wrapped), expected.mean)
    for step in range(1, STEPS):
        expected = Expected(twin, rank, step)
        wrapped.zero_grad()
        losses = per_sample(wrapped(inputs(rank, step)))
        with refused(r"`engine\.backward` writes gradients of this process alone"):
            engine.backward(losses, weighting)
        losses.backward(weighting(engine.compute_gramian(losses)))
        assert_close_to_reference(gradient(wrapped), expected.mean)


def static_graph_behind_the_engine(rank: int) -> None:
    """Of another part of the model, which the engine's pass goes through."""
    model = make_model()
    engine = Engine(model[0])
    head = DistributedDataParallel(model[1:], static_graph=True)
    losses = per_sample(head(model[0](inputs(rank, 0))))
    with refused("`static_graph=True`"):
        engine.compute_gramian(losses)


# Parts of a model


def wrapped_behind_the_engine(rank: int) -> None:
    """A head with gradients that are exchanged, and a trunk whose are not."""
    model, twin = make_model(), make_model()
    head = DistributedDataParallel(model[2:])
    engine = Engine(model[0])
    split = sum(p.numel() for p in model[0].parameters())
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        part = expected.jacobian[:, :split]
        model.zero_grad()
        losses = per_sample(head(model[1](model[0](inputs(rank, step)))))
        weights = weighting(part @ part.T)
        mean = _mean(expected.jacobian.T @ weights)
        found = engine.backward(losses, weighting, gradients_outside="weighted")
        assert_close_to_reference(found, weights)
        assert_close_to_reference(gradient(model)[:split], part.T @ weights)
        assert_close_to_reference(gradient(model)[split:], mean[split:])


def wrapped_in_front_of_the_engine(rank: int) -> None:
    """A trunk with gradients that are exchanged, and a head whose are not."""
    model, twin = make_model(), make_model()
    trunk = DistributedDataParallel(model[:2])
    engine = Engine(model[2:])
    split = sum(p.numel() for p in model[:2].parameters())
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        part = expected.jacobian[:, split:]
        model.zero_grad()
        losses = per_sample(model[2:](trunk(inputs(rank, step))))
        weights = weighting(part @ part.T)
        mean = _mean(expected.jacobian.T @ weights)
        found = engine.backward(losses, weighting, gradients_outside="weighted")
        assert_close_to_reference(found, weights)
        assert_close_to_reference(gradient(model)[split:], part.T @ weights)
        assert_close_to_reference(gradient(model)[:split], mean[:split])


def _mean(tensor: Tensor) -> Tensor:
    """The mean over the processes."""
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total / RANKS


# Shards


def _mesh() -> Any:
    return torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))


def sharded(model: nn.Module, *parts: int) -> nn.Module:
    """By `fully_shard`, some layers and the whole, or the whole alone."""
    from torch.distributed.fsdp import fully_shard

    for part in parts:
        fully_shard(model[part], mesh=_mesh())
    return fully_shard(model, mesh=_mesh())


def partly_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0], mesh=_mesh())
    return model


def sharded_from_outside(model: nn.Module) -> nn.Module:
    return sharded(nn.Sequential(model))


def sharded_by_the_first_version(model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=use_orig_params)


def parallel_in_tensors(model: nn.Module, *, by_columns_alone: bool) -> nn.Module:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if by_columns_alone:
        plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    else:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, _mesh(), plan)


SHARDS: dict[str, Wrap] = {
    "fully_shard": sharded,
    "fully_shard, layers too": lambda model: sharded(model, 0, 2, 4),
    "fully_shard, a layer alone": partly_sharded,
    "fully_shard, outside": sharded_from_outside,
    "FSDP": partial(sharded_by_the_first_version, use_orig_params=True),
    "FSDP, flat": partial(sharded_by_the_first_version, use_orig_params=False),
    "columns": partial(parallel_in_tensors, by_columns_alone=True),
    "columns and rows": partial(parallel_in_tensors, by_columns_alone=False),
}


UNSEEN_AT_FIRST = {("FSDP, flat", "of its layers")}


def shards_at_first(wrap: Wrap, place: Place, rank: int) -> None:
    """Refused where the engine is made."""
    del rank
    with refused("(sharded|DTensor|FullyShardedDataParallel).*that has all parameters in each"):
        place(wrap)


def shards_later(wrap: Wrap, place: Place, rank: int) -> None:
    """Refused by each call of an engine that was made before, or whose layers have nothing left."""
    engine, wrapped = place(wrap)
    losses = per_sample(wrapped(inputs(rank, 0)))
    for call in (
        engine.compute_gramian,
        engine.jacobian,
        engine.verify,
        lambda losses: engine.backward(losses, weighting),
    ):
        with refused("(sharded|DTensor|FullyShardedDataParallel).*that has all parameters in each"):
            call(losses)


def shards_behind_the_engine(rank: int) -> None:
    """The engine's pass would go through them."""
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    head = model[2:]
    fully_shard(head, mesh=_mesh())
    engine = Engine(model[0])
    losses = per_sample(head(model[1](model[0](inputs(rank, 0)))))
    with refused("through a part that is fully sharded"):
        engine.compute_gramian(losses)


def shards_in_front_of_the_engine(rank: int) -> None:
    """Where the engine's pass does not come: exact."""
    from torch.distributed.fsdp import fully_shard

    model, twin = make_model(), make_model()
    trunk = model[:2]
    fully_shard(trunk, mesh=_mesh())
    engine = Engine(model[2:])
    split = sum(p.numel() for p in twin[:2].parameters())
    for step in range(STEPS):
        expected = Expected(twin, rank, step)
        part = expected.jacobian[:, split:]
        model[2:].zero_grad()
        trunk.zero_grad()
        losses = per_sample(model[2:](trunk(inputs(rank, step))))
        gramian = engine.compute_gramian(losses)
        assert_close_to_reference(gramian, part @ part.T)
        losses.backward(weighting(gramian))
        assert_close_to_reference(gradient(model[2:]), part.T @ weighting(gramian))
        mean = _mean(expected.jacobian.T @ weighting(gramian))[:split]
        whole = [p.grad.full_tensor().flatten() for p in trunk.parameters()]
        assert_close_to_reference(torch.cat(whole), mean)


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    found: dict[str, Scenario] = {}
    for scenario in (two_passes, products, gradients, without_exchange):
        for name, wrap in WRAPPERS.items():
            for where, place in PLACES.items():
                found[f"{scenario.__name__}, {name}, {where}"] = partial(scenario, wrap, place)
    for where, place in PLACES.items():
        found[f"{static_graphs.__name__}, {where}"] = partial(static_graphs, place)
    for name, wrap in SHARDS.items():
        for where, place in PLACES.items():
            is_late = where == "from before" or (name, where) in UNSEEN_AT_FIRST
            scenario = shards_later if is_late else shards_at_first
            found[f"{scenario.__name__}, {name}, {where}"] = partial(scenario, wrap, place)
    for alone in (
        past_the_wrapper,
        a_group_and_no_wrapper,
        a_group_of_one,
        checkpoints,
        losses_of_two_forwards,
        static_graph_behind_the_engine,
        wrapped_behind_the_engine,
        wrapped_in_front_of_the_engine,
        shards_behind_the_engine,
        shards_in_front_of_the_engine,
    ):
        found[alone.__name__] = alone
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What two processes say of all scenarios."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this PyTorch has no processes on CPUs")
    folder: Path = tmp_path_factory.mktemp("processes")
    return run_in_two_processes(scenarios, folder)


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))


def test_failures_are_seen(tmp_path: Path) -> None:
    """In either process, and those of the scenario that ends early."""
    outcomes = run_in_two_processes(failing_scenarios, tmp_path)
    assert [bool(text) for text in outcomes["the second"]] == [False, True]
    assert "it is wrong" in outcomes["the second"][1]
    assert outcomes["nobody"] == ["", ""]


def failing_scenarios() -> Mapping[str, Scenario]:
    def fail(rank: int) -> None:
        torch.distributed.barrier()  # the one behind the scenario is then the other's next one
        if rank == 1:
            torch.distributed.barrier()
            raise AssertionError("it is wrong")

    return {"the second": fail, "nobody": print}


# In one process


@pytest.mark.cpu
def test_data_parallel_on_one_device() -> None:
    """Exact: it is the module itself that runs."""
    model = mlp()
    wrapped = DataParallel(model)
    for module in (model, wrapped):
        engine = Engine(module)
        for _ in range(STEPS):
            assert_exact(engine, per_sample(wrapped(batch(4, 3))), model)


def test_data_parallel_on_several_devices_is_refused() -> None:
    wrapped = DataParallel(mlp())
    wrapped.device_ids = [0, 1]
    for module in (wrapped, nn.Sequential(wrapped)):
        with refused(r"on 2 .*which runs copies of the module"):
            Engine(module)


def test_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a PyTorch that was built without it."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    monkeypatch.delattr(DistributedDataParallel, "_active_ddp_module")
    model = mlp()
    engine = Engine(model)
    engine.backward(per_sample(model(batch(4, 3))), weighting)
    assert_exact(engine, per_sample(model(batch(4, 3))), model)
