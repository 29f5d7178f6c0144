"""Nothing outlives the losses: no cycles, no growth, no recording."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autogram import Engine
from tests.unit._blocks.programs.at_once import write_programs_at_once
from tests.unit.alive import live_objects, live_tensors
from tests.unit.engines import batch, mlp, per_sample
from tests.unit.networks import Sine

pytestmark = pytest.mark.usefixtures("without_collector")


class Various(nn.Module):
    """Rules, the fallback, derived tensors, in-place calls, an unseen function, a composite."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(batch(5, 4))
        self.attention = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.frequency = nn.Parameter(batch(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.embedding[torch.arange(x.shape[1])]
        hidden = self.recurrent(self.attention(hidden))[0].sin()  # cuDNN keeps its own result
        hidden += self.frequency
        hidden = checkpoint(self.normed, hidden, use_reentrant=False)
        return self.last(Sine.apply(hidden[:, -1], self.frequency.cos()))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "simple": (mlp, (4, 3)),
    "various": (Various, (3, 5, 4)),
}


@contextmanager
def seen_activations(model: nn.Module) -> Iterator[list[weakref.ref[Tensor]]]:
    """Weak references to the outputs of all modules."""
    seen: list[weakref.ref[Tensor]] = []

    def see(_: nn.Module, __: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        seen.extend(weakref.ref(tensor) for tensor in tensors if tensor is not None)

    handles = [m.register_forward_hook(see) for m in model.modules() if m is not model]
    yield seen
    for handle in handles:
        handle.remove()


def _losses(output: Tensor, each: int) -> Tensor:
    return per_sample(output) if each == 1 else output


@pytest.mark.parametrize("ends_with", ["nothing", "gramian", "backward", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_activations_die_with_the_losses(name: str, ends_with: str) -> None:
    """As soon as the user drops losses and output, whatever was called before."""
    make, shape = MODELS[name]
    model = make()
    model(batch(*shape)).sum().backward()  # PyTorch's own modules for checkpoints make cycles once
    engine = Engine(model)
    with seen_activations(model) as seen:
        for _ in range(2):
            output = model(batch(*shape))
            losses = per_sample(output)
            if ends_with in ("gramian", "both"):
                engine.compute_gramian(losses)
            if ends_with in ("backward", "both"):
                losses.sum().backward()
            assert seen
            del losses, output
            assert [ref for ref in seen if ref() is not None] == []


@pytest.mark.parametrize("error", ["forward", "mixed"])
def test_activations_die_after_an_error(error: str) -> None:
    """A forward pass that raises, and a call that raises."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    engine = Engine(model, batch_dim=0)
    with seen_activations(model) as seen:
        try:
            if error == "forward":
                model[3].forward = lambda x: x.view(17)
                model(batch(4, 3))
            else:
                engine.compute_gramian(per_sample(model(batch(4, 3))))
        except (RuntimeError, ValueError):
            pass
        else:
            pytest.fail("nothing was raised")
        assert len(seen) >= 3
        assert [ref for ref in seen if ref() is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_no_reference_cycles(name: str, each: int) -> None:
    """The collector finds nothing to do after a step."""
    make, shape = MODELS[name]
    model = make()
    engine = Engine(model)

    def step() -> None:
        losses = _losses(model(batch(*shape)), each)
        engine.compute_gramian(losses)
        losses.sum().backward()

    step()  # caches of first times
    gc.collect()
    step()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        garbage = [x for x in gc.garbage if type(x).__module__.startswith(("torch", "autogram"))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert [type(x) for x in garbage] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tensors_alive_over_fifty_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many after the last step as after the first ones, in which programs are written."""
    write_programs_at_once(monkeypatch)
    make, shape = MODELS[name]
    model = make()
    engine = Engine(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    counts = []
    for step in range(50):
        losses = per_sample(model(batch(*shape)))
        gramian = engine.compute_gramian(losses)
        losses.backward(gramian.mean(0) / gramian.sum())
        optimizer.step()
        optimizer.zero_grad()
        del losses, gramian
        if step % 15 == 4:  # counting takes longer than a step
            counts.append((live_tensors(), live_objects()))
    assert set(counts) == {counts[0]}


def test_passes_that_are_never_used() -> None:
    """Outputs that are dropped without a backward pass, in any order."""
    model = mlp()
    engine = Engine(model)
    model(batch(4, 3))
    tensors, objects = live_tensors(), live_objects()
    kept = [model(batch(4, 3)) for _ in range(5)]
    each = (live_objects() - objects) / 5
    assert each > 0
    del kept[1:4]
    assert live_objects() - objects == 2 * each
    kept.clear()
    assert (live_tensors(), live_objects()) == (tensors, objects)
    del engine


def test_many_shapes() -> None:
    """What is remembered of shapes is bounded, and holds no tensors."""
    model = mlp()
    engine = Engine(model)
    for positions in (1, 29):
        engine.compute_gramian(per_sample(model(batch(2, positions, 3))))
    before = live_tensors()
    for positions in range(1, 30):
        engine.compute_gramian(per_sample(model(batch(2, positions, 3))))
    assert live_tensors() == before


def test_gramian_owns_its_memory() -> None:
    """Keeping Gramians keeps nothing else."""
    model = mlp()
    engine = Engine(model)
    gramian = engine.compute_gramian(per_sample(model(batch(4, 3))))
    assert gramian.grad_fn is None
    assert gramian.untyped_storage().nbytes() == gramian.numel() * gramian.element_size()
    assert not any(
        gramian.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
        for p in model.parameters()
    )


def test_an_engine_that_is_dropped_dies() -> None:
    """No cycle keeps it, also when the model and a graph live on."""
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3)))
    engine.compute_gramian(losses)
    dead = weakref.ref(engine)
    del engine
    assert dead() is None
    losses.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_that_is_dropped_dies() -> None:
    """The engine and its hooks do not keep it."""
    model = mlp()
    engine = Engine(model)
    engine.compute_gramian(per_sample(model(batch(4, 3))))
    dead = weakref.ref(model[0].weight)
    del model
    gc.collect()  # modules are in cycles of PyTorch's own making, perhaps
    assert dead() is None
    del engine
