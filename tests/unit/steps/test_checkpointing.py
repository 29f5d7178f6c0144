"""Checkpointing and saved-tensor hooks: what saves memory changes no number."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from autogram import Engine, UnsupportedError
from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SEVERAL,
    Objectives,
    assert_gramian_is_exact,
    trainable,
)
from tests.unit.engines import assert_exact, batch, mlp, per_sample

EXACT = pytest.mark.parametrize("objectives", [PER_SAMPLE, SEVERAL, COUPLED], ids=repr)

saving = partial(checkpoint, use_reentrant=False)


class Dropped(nn.Module):
    """A block with parameters of its own, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x).tanh() * self.scale, 0.3)


class Scaled(nn.Module):
    """A block that is given a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return (self.linear(x) * factor).tanh()


class Checkpointed(nn.Module):
    """Two blocks and a free parameter, and a forward pass that a test writes down."""

    def __init__(self, run: Callable[["Checkpointed", Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.first, self.second, self.scaled = Dropped(), Dropped(), Scaled()
        self.weight = nn.Parameter(batch(4, 4))
        self.table = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _nested(m: Checkpointed, x: Tensor) -> Tensor:
    return saving(lambda y: m.second(saving(m.first, y) @ m.weight), x) * m.weight[0]


def _nested_functions(m: Checkpointed, x: Tensor) -> Tensor:
    """Neither of the two enters a module."""
    inner = lambda y: (y @ m.weight).tanh()  # noqa: E731
    return saving(lambda y: inner(saving(inner, y) * m.weight[1]), x)


def _nested_of_parameters(m: Checkpointed, x: Tensor) -> Tensor:
    """When the inner one runs again, it is given a copy of the parameter."""
    return x @ saving(lambda w: m.second(saving(m.first, w)), m.weight) + m.first(x)


def _function_between_modules(m: Checkpointed, x: Tensor) -> Tensor:
    """Uses of the root's parameter before, between and behind blocks."""

    def part(y: Tensor) -> Tensor:
        return m.second(m.first(y @ m.weight) * m.weight[0]) + m.weight[1]

    return saving(part, x)


def _parameter_as_argument(m: Checkpointed, x: Tensor) -> Tensor:
    return saving(F.linear, x, m.weight, bias=m.weight[0])


def _derived_outside(m: Checkpointed, x: Tensor) -> Tensor:
    """What is computed from parameters before the checkpoint begins, and is read in it."""
    normed = F.normalize(m.weight, dim=0)
    return saving(lambda y: m.first(y @ normed) + normed[0], x)


def _derived_inside(m: Checkpointed, x: Tensor) -> Tensor:
    return saving(lambda y: m.first(y @ F.normalize(m.weight, dim=0)), x)


def _returns_derived(m: Checkpointed, x: Tensor) -> Tensor:
    """The result of the checkpoint depends on no sample."""
    return x @ saving(F.normalize, m.weight)


def _same_block_twice(m: Checkpointed, x: Tensor) -> Tensor:
    return saving(m.first, saving(m.first, x)) + m.first(x)


def _in_place(m: Checkpointed, x: Tensor) -> Tensor:
    def part(y: Tensor) -> Tensor:
        y = m.first(y)
        y += m.weight[0]
        return y.mul_(m.weight[1]).tanh()

    return saving(part, x)


def _without_a_rule(m: Checkpointed, x: Tensor) -> Tensor:
    return saving(lambda y: torch.cdist(m.first(y), m.table.weight, p=1.0), x)


def _several_results(m: Checkpointed, x: Tensor) -> Tensor:
    first, both = saving(lambda y: (m.first(y), {"second": m.second(y) * m.weight[0]}), x)
    return first * both["second"]


def _lookup(m: Checkpointed, x: Tensor) -> Tensor:
    """Attention to learnt rows, picked by the samples themselves."""
    return saving(lambda y: m.first(y) + m.table(y.argmax(-1)), x)


def _method_of_a_block(m: Checkpointed, x: Tensor) -> Tensor:
    """A block's parameters are read by a call past its forward."""
    return saving(lambda y: F.linear(y, m.first.linear.weight, m.first.linear.bias), x)


def _derived_argument(m: Checkpointed, x: Tensor) -> Tensor:
    """The checkpointed module is given what was computed from parameters before, of any shape."""
    normed = F.normalize(m.weight, dim=0)
    for factor in (normed[0], normed[:1], normed[: len(x)]):
        x = saving(m.scaled, x, factor)
    return x


def _derived_in_a_function(m: Checkpointed, x: Tensor) -> Tensor:
    """The same, computed in the part of the checkpoint that enters no module."""
    normed = F.normalize(m.weight, dim=0)

    def part(y: Tensor) -> Tensor:
        for factor in (normed[0], m.weight[:1].exp()):
            y = m.scaled(y, factor)
        return m.scaled(y, y @ m.weight)  # and this one has samples

    return saving(part, x)


RUNS = [
    _derived_argument,
    _derived_in_a_function,
    _nested,
    _nested_functions,
    _nested_of_parameters,
    _function_between_modules,
    _parameter_as_argument,
    _derived_outside,
    _derived_inside,
    _returns_derived,
    _same_block_twice,
    _in_place,
    _without_a_rule,
    _several_results,
    _lookup,
    _method_of_a_block,
]


@EXACT
@pytest.mark.parametrize("run", RUNS)
def test_checkpoints_anywhere(run: Any, objectives: Objectives) -> None:
    """Blocks and bare functions, one within the other, with the same dropout."""
    assert_gramian_is_exact(lambda: Checkpointed(run), batch(3, 4), objectives=objectives)


@pytest.mark.parametrize("run", RUNS)
def test_checkpoints_that_run_to_the_end(run: Any) -> None:
    """Without the early stop, the second run goes on behind the last tensor that is needed."""
    with set_checkpoint_early_stop(False):
        assert_gramian_is_exact(lambda: Checkpointed(run), batch(3, 4))


def _save_products(_: Any, function: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    kept = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return CheckpointPolicy.MUST_SAVE if function in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _save_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _selective(policy: Callable[..., CheckpointPolicy], function: Any, x: Tensor) -> Tensor:
    context_fn = partial(create_selective_checkpoint_contexts, policy)
    return saving(function, x, context_fn=context_fn)


def _selective_modules(policy: Any, m: Checkpointed, x: Tensor) -> Tensor:
    return _selective(policy, m.second, _selective(policy, m.first, x)) @ m.weight


def _selective_function(policy: Any, m: Checkpointed, x: Tensor) -> Tensor:
    """Parameters are read where no module is entered."""
    return _selective(policy, lambda y: ((y @ m.weight).tanh() @ m.weight).tanh(), x)


@EXACT
@pytest.mark.parametrize("run", [_selective_modules, _selective_function])
def test_selective_checkpoints_that_keep_nothing(run: Any, objectives: Objectives) -> None:
    """They are checkpoints as any other."""
    make_model = lambda: Checkpointed(partial(run, _save_nothing))  # noqa: E731
    assert_gramian_is_exact(make_model, batch(3, 4), objectives=objectives)


@pytest.mark.parametrize("run", [_selective_modules, _selective_function])
@pytest.mark.parametrize("batch_dim", ["auto", 0])
def test_selective_checkpoints_are_refused(run: Any, batch_dim: Any) -> None:
    """PyTorch hands out what they keep to one backward pass alone, whatever `retain_graph` says."""
    model = Checkpointed(partial(run, _save_products))
    engine = Engine(model, batch_dim=batch_dim)
    with pytest.raises(UnsupportedError, match="Leave out `context_fn`"):
        engine.compute_gramian(per_sample(model(batch(3, 4))))


def test_each_part_runs_once_more() -> None:
    """The Gramian costs one more run of a part, where samples were found before."""
    model = Checkpointed(lambda m, x: saving(m.second, saving(m.first, x)))
    counts = {"first": 0, "second": 0}

    def count(name: str, *_: Any) -> None:
        counts[name] += 1

    model.first.register_forward_pre_hook(partial(count, "first"))
    model.second.register_forward_pre_hook(partial(count, "second"))
    engine = Engine(model, verify="never")
    for _ in range(2):
        losses = per_sample(model(batch(3, 4)))
        counts.update(first=0, second=0)
        engine.compute_gramian(losses)
    assert counts == {"first": 1, "second": 1}


# --- Second runs that are as the first -----------------------------------------------------------


def _run(function: Callable[[], object], *, in_thread: bool) -> None:
    """Runs a function, perhaps in another thread, where autograd computes what is on a GPU."""
    if in_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(function).result()
    else:
        function()


@pytest.mark.parametrize("in_thread", [False, True], ids=["here", "in a thread"])
@pytest.mark.parametrize("when", ["forward", "backward", "both", "inactive", "made later"])
@pytest.mark.parametrize("run", [_nested, _function_between_modules, _same_block_twice])
def test_an_engine_that_is_not_there_in_one_of_both_runs(
    run: Any, when: str, in_thread: bool
) -> None:
    """Beside a graph of the same shapes in which it is there in both."""
    model, x = Checkpointed(run), batch(3, 4)
    torch.manual_seed(0)
    plain = per_sample(model(x))
    expected = torch.autograd.grad(plain.sum(), trainable(model), allow_unused=True)
    engine = None if when == "made later" else Engine(model)
    other = per_sample(model(x))
    torch.manual_seed(0)
    if engine is not None and when == "inactive":
        engine.hooks.deactivate()
    with engine.paused() if engine and when in ("forward", "both") else nullcontext():
        losses = per_sample(model(x))
    if engine is None:
        engine = Engine(model)
    engine.hooks.activate()
    with engine.paused() if when in ("backward", "both") else nullcontext():
        _run(lambda: losses.sum().backward(retain_graph=True), in_thread=in_thread)
    for parameter, gradient in zip(trainable(model), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    for each in (losses, other, losses):
        assert_exact(engine, each, model)


class Anchored(nn.Module):
    """A checkpointed block beside a constant, which is given to the model first, or to the block.

    A block that runs again sees its own inputs alone.
    """

    def __init__(self, *, is_outside: bool) -> None:
        super().__init__()
        self.is_outside = is_outside
        self.block, self.last = Scaled(), nn.Linear(4, 4)

    def forward(self, constant: Tensor, x: Tensor) -> Tensor:
        block = self.block
        if self.is_outside:
            return self.last(saving(block, x, x.new_ones(4))) + (x @ constant.T).sum(1, True)
        return self.last(saving(lambda c, y: block(y, c[: len(y)]), constant, x))


@pytest.mark.parametrize("is_outside", [True, False])
def test_constants_beside_a_checkpoint(is_outside: bool) -> None:
    """What is first in the inputs decides what counts as samples, in both runs."""
    model = Anchored(is_outside=is_outside)
    engine = Engine(model)
    for constants, samples in ((7, 3), (7, 3), (5, 2), (3, 3), (7, 1)):
        losses = per_sample(model(batch(constants, 4), batch(samples, 4)))
        losses.sum().backward(retain_graph=True)
        assert_exact(engine, losses, model)


# --- Saved-tensor hooks ---------------------------------------------------------------------------


@contextmanager
def _copies() -> Iterator[None]:
    """Hooks that keep other tensors than the ones that were saved."""
    with saved_tensors_hooks(lambda x: [x.detach().clone()], lambda packed: packed[0].clone()):
        yield


@contextmanager
def _compressed() -> Iterator[None]:
    """Hooks that keep what is not zero, with its places."""
    with saved_tensors_hooks(lambda x: x.detach().to_sparse(), lambda packed: packed.to_dense()):
        yield


HOOKS = {"on cpu": save_on_cpu, "copies": _copies, "compressed": _compressed}


def _everything(m: Checkpointed, x: Tensor) -> Tensor:
    """Rules, the fallback, a lookup, an in-place call, a derived tensor."""
    y = m.second(m.first(x) + m.table(x.argmax(-1)))
    y = torch.cdist(y, m.table.weight, p=1.0)[:, :4]
    y *= m.weight[0]
    return y @ F.normalize(m.weight, dim=0)


@EXACT
@pytest.mark.parametrize("name", HOOKS)
def test_saved_tensor_hooks_inside(name: str, objectives: Objectives) -> None:
    """Hooks of the model itself."""

    def run(m: Checkpointed, x: Tensor) -> Tensor:
        with HOOKS[name]():
            return _everything(m, x)

    assert_gramian_is_exact(lambda: Checkpointed(run), batch(3, 4), objectives=objectives)


@EXACT
@pytest.mark.parametrize("name", HOOKS)
def test_saved_tensor_hooks_outside(name: str, objectives: Objectives) -> None:
    """Hooks around the forward pass and the losses."""
    model = Checkpointed(_everything)
    engine = Engine(model, batch_dim=objectives.batch_dim)
    with HOOKS[name]():
        losses = objectives.of(model(batch(3, 4)))
    assert_exact(engine, losses, model)
    assert_exact(engine, losses, model)


def test_hooks_in_a_checkpoint_in_hooks() -> None:
    """Each of them around the other."""

    def part(m: Checkpointed, x: Tensor) -> Tensor:
        with save_on_cpu():
            return m.second(m.first(x)) @ m.weight

    def run(m: Checkpointed, x: Tensor) -> Tensor:
        with _copies():
            return saving(partial(part, m), x) + m.weight[0]

    assert_gramian_is_exact(lambda: Checkpointed(run), batch(3, 4))


def test_what_taps_save_goes_through_hooks() -> None:
    """And is what autograd saves anyway: as many storages are packed as without an engine."""

    def count_packed(model: nn.Module, x: Tensor) -> int:
        seen: set[int] = set()
        kept: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor)  # alive, or its address would be taken again
            seen.add(tensor.untyped_storage().data_ptr())
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            losses = per_sample(model(x))
        assert losses.requires_grad
        return len(seen)

    model, x = mlp(), batch(4, 3)
    plain = count_packed(model, x)
    engine = Engine(model)
    assert count_packed(model, x) == plain
    assert engine is not None
