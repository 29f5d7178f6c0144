"""Compiled parts among other things: engines, recordings, autocast, copies, and recompilations."""

import copy
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autogram import Engine, UnseenUseWarning
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import (
    Decoder,
    assert_step,
    assert_steps,
    compile_inside,
    compiled,
    language_losses,
    sequences,
)
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.environment import DEVICE

pytestmark = pytest.mark.slow


def _mlp(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def _batches(*sizes: int) -> list[tuple[Tensor]]:
    return [(torch.randn(size, 3),) for size in sizes]


def _squares(y: Tensor, _: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


class InPlace(nn.Module):
    """Parameters that are added and multiplied in place, also into a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.shift, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.part = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = x + 0
        x.add_(self.shift).mul_(self.scale)
        x = x.sin()
        x[:, 1:3] += self.part
        found: Tensor = self.last(x.tanh())
        return found


def test_uses_in_place() -> None:
    model = InPlace()
    engine = Engine(model, unseen="error")
    assert_steps(model, compiled(model), engine, _batches(4, 4, 5), _squares)


class Biased(nn.Module):
    """A layer that is given a bias of attention, which the first of its kind has computed."""

    def __init__(self, *, has_table: bool) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Embedding(5, 1) if has_table else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.table is not None
            places = torch.arange(x.shape[1])
            bias = self.table((places[:, None] - places).clamp(-2, 2) + 2).squeeze(2)
        scores = x @ self.mix(x).transpose(1, 2) + bias
        return x + self.out(scores.softmax(2) @ x), bias


class SharedBias(nn.Module):
    """Layers that share one bias of attention, as those of T5."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Biased(has_table=i == 0) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class TestDerivedInputs:
    """A tensor that is computed from parameters alone goes from one part to the next."""

    def _batches(self) -> list[tuple[Tensor]]:
        return [(torch.randn(*sizes, 4),) for sizes in ((3, 5), (3, 5), (4, 5), (3, 6))]

    def test_whole(self) -> None:
        model = SharedBias()
        engine = Engine(model, unseen="error")
        assert_steps(model, compiled(model), engine, self._batches(), _squares)

    @pytest.mark.parametrize("from_parts", [True, False], ids=["from a part", "from eager"])
    def test_layer_by_layer(self, from_parts: bool) -> None:
        model = SharedBias()
        twin = copy.deepcopy(model)
        engine = Engine(model, unseen="error")
        for layer in model.layers[0 if from_parts else 1 :]:
            compile_inside(layer)
        for (x,) in self._batches():
            expected = _squares(twin(x), x)
            assert_step(engine, _squares(model(x), x), expected, trainable(model), trainable(twin))


class TestSeveralEngines:
    """A call of a part may be shown to several engines, or to one that has several parts."""

    def test_on_one_model(self) -> None:
        model = Decoder()
        engines = [Engine(model, unseen="error"), Engine(model.blocks, unseen="error")]
        run = compiled(model)
        for _ in range(2):
            (ids,) = sequences(4, 6)
            losses = language_losses(run(ids), ids)
            for engine, parameters in zip(
                engines, (model.parameters(), model.blocks.parameters()), strict=True
            ):
                jacobian = reference_jacobian(losses, list(parameters))
                assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)

    def test_each_looks_at_its_own_uses(self) -> None:
        model = _mlp()
        run = compiled(model)
        engines = [Engine(of, verify="never") for of in (model[0], model[2], model)]
        for _ in range(3):
            losses = _squares(run(torch.randn(4, 3)), torch.empty(0))
            for engine, part in zip(engines, (model[0], model[2], model), strict=True):
                jacobian = reference_jacobian(losses, list(part.parameters()))
                assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
                assert engine._drivers.last.summary.samples > 1

    def test_one_is_paused(self) -> None:
        """It is told that it was paused, and not that a backend of another name would help."""
        model = _mlp()
        run = compiled(model)
        engines = Engine(model), Engine(model)
        for step in range(3):
            with engines[step % 2].paused():
                losses = _squares(run(torch.randn(4, 3)), torch.empty(0))
            jacobian = reference_jacobian(losses, list(model.parameters()))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for engine in engines:
                    gramian = engine.compute_gramian(losses)
                    assert_close_to_reference(gramian, jacobian @ jacobian.T)
            expected = [UnseenUseWarning] if step < 2 else []  # once for each engine
            assert [of.category for of in told] == expected

    def test_removed(self) -> None:
        model = _mlp()
        kept, removed = Engine(model, unseen="error"), Engine(model)
        run = compiled(model)
        assert_steps(model, run, kept, _batches(4), _squares)
        removed.remove()
        assert_steps(model, run, kept, _batches(4), _squares)

    def test_several_parts(self) -> None:
        body, head = _mlp(), nn.Linear(2, 2)
        engine = Engine(body, head, unseen="error")
        runs = compiled(body), compiled(head)
        for x, *_ in _batches(4, 4, 5):
            losses = _squares(runs[1](runs[0](x).sin()), x)
            with engine.paused():
                expected = _squares(head(body(x).sin()), x)
            assert_step(engine, losses, expected, [*body.parameters(), *head.parameters()])

    def test_inactive_hooks(self) -> None:
        """Parameters of modules whose hooks are inactive are constants to J."""
        model = _mlp()
        engine = Engine(model)
        run = compiled(model)
        (x,) = _batches(4)[0]
        engine.hooks.deactivate(module=model[0])
        for active in (model[2], model, model[2]):
            losses = _squares(run(x), x)
            jacobian = reference_jacobian(losses, list(active.parameters()))
            assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
            if active is model[2]:
                engine.hooks.activate(module=model[0])
            else:
                engine.hooks.deactivate(module=model[0])

    def test_paused_and_recorded_by_turns(self) -> None:
        """Layers inside of a recording, and without one."""
        model = Decoder()
        twin = copy.deepcopy(model)
        engine = Engine(model, unseen="error")
        for block in model.blocks:
            compile_inside(block)
        for _ in range(3):
            (ids,) = sequences(4, 6)
            with engine.paused():
                assert torch.allclose(model(ids), twin(ids))
            losses, expected = (language_losses(m(ids), ids) for m in (model, twin))
            assert_step(engine, losses, expected, trainable(model), trainable(twin))


@pytest.mark.parametrize("is_inside", [True, False])
def test_autocast(is_inside: bool) -> None:
    """As exact as autocast's own gradients: of the same graph, objective by objective."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = _mlp(8), nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=is_inside):
                y = self.body(x)
            found: Tensor = self.head(y.float() if is_inside else y)
            return found

    model = Cast().float()
    engine = Engine(model, unseen="error")
    run = compiled(model)
    for size in (6, 6, 4):
        x = torch.randn(size, 3, dtype=torch.float32)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=not is_inside):
            losses = _squares(run(x).float(), x)
        jacobian = reference_jacobian(losses, list(model.parameters()))
        expected = jacobian @ jacobian.T
        error = (engine.compute_gramian(losses) - expected).abs().max() / expected.abs().max()
        assert error < 2e-2


class Wrong(nn.Module):
    """A model whose forward does not work."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x))  # four features where five are expected


def test_errors_name_the_line() -> None:
    """An error in a compiled part is that of the user's code, and a later call works."""
    model = Wrong()
    engine = Engine(model, unseen="error")
    run = compiled(model)
    with pytest.raises(Exception, match=r"return self\.last\(self\.first\(x\)\)"):
        run(torch.randn(4, 3))
    model.last = nn.Linear(4, 2)
    torch._dynamo.reset()
    engine = Engine(model, unseen="error")
    assert_steps(model, compiled(model), engine, _batches(4), _squares)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    """What a mode changes is left to inductor. On a CPU there are no graphs of CUDA."""
    model = _mlp()
    engine = Engine(model, unseen="error")
    run = torch.compile(model, backend="autogram", mode=mode)
    assert_steps(model, run, engine, _batches(4, 4), _squares)


@pytest.mark.usefixtures("without_collector")
def test_memory_is_freed_without_the_collector() -> None:
    """What an engine is shown of a call goes with its losses."""
    model = _mlp()
    engine = Engine(model, unseen="error")
    run = compiled(model)
    for x, *_ in _batches(4, 4):
        engine.compute_gramian(_squares(run(x), x))
    losses = _squares(run(x), x)
    (recording,) = engine._channel.recordings
    seen = weakref.ref(recording)
    del recording
    engine.compute_gramian(losses)
    del losses
    assert seen() is None


@pytest.mark.filterwarnings("ignore::autogram.CompiledPartWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "autogram"])
def test_unseen_parts_in_a_checkpoint(backend: str) -> None:
    """They get rows by ordinary backward passes, in each of which the checkpoint runs again."""
    model = _mlp()
    engine = Engine(model, unseen="rows")
    options = {"autogram.inner": "aot_eager"} if backend == "autogram" else None
    run = torch.compile(model, backend=backend, options=options)
    for (x,) in _batches(4, 4, 4):
        with engine.paused():
            y = checkpoint(run, x, use_reentrant=False)
        losses = y.square().sum(1)
        assert_step(engine, losses, losses, trainable(model))
