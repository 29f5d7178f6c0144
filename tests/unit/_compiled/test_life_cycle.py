"""Compiled models in the course of a training: what comes first, changes, and is copied."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, UnsupportedError
from autogram._compiled import autogram
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import (
    INNER,
    Decoder,
    assert_step,
    assert_steps,
    compile_inside,
    compiled,
    counted_parts,
    language_losses,
    sequences,
)
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.environment import DEVICE, device_of_threads

pytestmark = pytest.mark.slow


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _batches(*sizes: int) -> list[tuple[Tensor]]:
    return [(torch.randn(size, 3),) for size in sizes]


def _squares(y: Tensor, _: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


@pytest.mark.parametrize("inner", INNER)
def test_engine_last(inner: str) -> None:
    """Behind a call without gradients, and behind a whole step."""
    model = _mlp()
    run = compiled(model, inner)
    x = torch.randn(4, 3)
    with torch.no_grad():
        run(x)
    run(x).sum().backward()
    with torch.inference_mode():
        run(x)
    model.zero_grad()
    engine = Engine(model, unseen="error")
    assert_steps(model, run, engine, _batches(4, 4, 5), _squares)


def test_evaluation_first() -> None:
    model = Decoder(dropout=0.3)
    engine = Engine(model, unseen="error")
    run = compiled(model)
    (ids,) = sequences(4, 6)
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            run(ids)
    model.train()
    for _ in range(2):
        losses = language_losses(run(ids), ids)
        assert_step(engine, losses, losses, trainable(model))


def test_autocast_by_turns() -> None:
    """As exact as the gradients of each graph, in the precision of each."""
    model = _mlp().float()
    engine = Engine(model, unseen="error")
    run = compiled(model)
    for is_on in (False, True, False, True):
        x = torch.randn(4, 3, dtype=torch.float32)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=is_on):
            losses = _squares(run(x).float(), x)
        jacobian = reference_jacobian(losses, list(model.parameters()))
        expected = jacobian @ jacobian.T
        error = (engine.compute_gramian(losses) - expected).abs().max() / expected.abs().max()
        assert error < (2e-2 if is_on else 1e-5)


def test_blocks_compiled_before_the_engine() -> None:
    model = Decoder(layers=3)
    twin = copy.deepcopy(model)
    for block in model.blocks:
        compile_inside(block)
    with counted_parts() as parts:
        model(*sequences(4, 6))
        engine = Engine(model, unseen="error")
        for _ in range(2):
            (ids,) = sequences(4, 6)
            losses, expected = (language_losses(m(ids), ids) for m in (model, twin))
            assert_step(engine, losses, expected, trainable(model), trainable(twin))
    assert len(parts) <= 2


def test_evaluation_in_between() -> None:
    model = Decoder(dropout=0.3)
    engine = Engine(model, unseen="error")
    run = compiled(model)
    (ids,) = sequences(4, 6)
    for _ in range(2):
        losses = language_losses(run(ids), ids)
        assert_step(engine, losses, losses, trainable(model))
        model.eval()
        with engine.paused():
            expected = model(ids)
        assert torch.allclose(run(ids), expected)
        losses = language_losses(run(ids), ids)
        assert_step(engine, losses, losses, trainable(model))
        with torch.no_grad():
            assert torch.allclose(run(ids), expected)
        with torch.inference_mode():
            assert torch.allclose(run(ids), expected)
        model.train()


def test_frozen_parts() -> None:
    """Parameters are frozen and freed between steps."""
    model = Decoder()
    engine = Engine(model, unseen="error")
    run = compiled(model)
    for _ in range(2):
        assert_steps(model, run, engine, [sequences(4, 6)], language_losses)
        model.blocks[0].qkv.weight.requires_grad_(False)
        model.places.weight.requires_grad_(False)
        assert_steps(model, run, engine, [sequences(4, 6)], language_losses)
        model.requires_grad_(True)


@pytest.mark.parametrize("inner", INNER)
def test_frozen_behind_the_forward_pass(inner: str) -> None:
    """Refused, as J would have rows of it; and what is trained from then on has no part in it."""
    model = _mlp()
    run = compiled(model, inner)
    engine = Engine(model, unseen="error")
    x = torch.randn(4, 3)
    for frozen in (model[0].weight, model[2].bias):
        losses = _squares(run(x), x)
        frozen.requires_grad_(False)
        for call in (engine.compute_gramian, engine.jacobian):
            with pytest.raises(
                UnsupportedError, match=r"frozen after the forward pass: `\d\.\w+`\."
            ):
                call(losses)
        others = trainable(model)
        expected, later = _squares(model(x), x), _squares(run(x), x)
        frozen.requires_grad_(True)
        assert_step(engine, later, expected, others)
        assert frozen.grad is None
        assert_step(engine, losses, _squares(model(x), x), trainable(model))


def test_parameters_are_freed() -> None:
    """PyTorch compiles anew. Before 2.12 it may not notice, and gradients would be missing."""
    model = Decoder()
    engine = Engine(model, unseen="error")
    run = compiled(model)
    model.blocks[0].qkv.weight.requires_grad_(False)
    assert_steps(model, run, engine, [sequences(4, 6)], language_losses)
    model.requires_grad_(True)
    try:
        assert_steps(model, run, engine, [sequences(4, 6)], language_losses)
    except UnsupportedError:
        torch._dynamo.reset()
        assert_steps(model, run, engine, [sequences(4, 6)], language_losses)


@pytest.mark.parametrize("are_all_frozen", [True, False])
def test_freed_parameters_of_a_compiled_part(are_all_frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    (model if are_all_frozen else model[0]).requires_grad_(False)
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        function = autogram(graph, inputs, options={"autogram.inner": "aot_eager"})

        def run(*args: Any) -> Any:
            calls.append((function, args))
            return function(*args)

        return run

    torch.compile(model, backend=backend)(torch.randn(5, 3))
    ((function, args),) = calls
    model.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"trainable now.*Call `torch\._dynamo\.reset\(\)`"):
        function(*args)
    with torch.no_grad():  # where none are missed
        function(*args)


def test_paused() -> None:
    """The same graph serves calls that the engine sees and calls that it does not."""
    model = Decoder()
    engine = Engine(model, unseen="error")
    run = compiled(model)
    with counted_parts() as parts:
        for _ in range(2):
            assert_steps(model, run, engine, [sequences(4, 6)], language_losses)
            (ids,) = sequences(4, 6)
            with engine.paused():
                losses = language_losses(run(ids), ids)
            assert not any("Entry" in type(x).__name__ for x, _ in losses.grad_fn.next_functions)
            losses.sum().backward()
            model.zero_grad()
    assert len(parts) == 1


class TestCopies:
    """What is compiled is not copied or saved, and what is copied can be compiled."""

    def test_deep_copy(self) -> None:
        model = Decoder()
        engine = Engine(model, unseen="error")
        compile_inside(model.blocks[0])
        assert_steps(model, model, engine, [sequences(4, 6)], language_losses)
        copied = copy.deepcopy(model)
        other = Engine(copied, unseen="error")
        assert_steps(copied, copied, other, [sequences(4, 6)], language_losses)
        assert_steps(model, model, engine, [sequences(4, 6)], language_losses)

    def test_saved(self) -> None:
        model = compiled(_mlp())
        engine = Engine(model, unseen="error")
        for x, *_ in _batches(4):
            assert engine.compute_gramian(_squares(model(x), x)).shape == (4, 4)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = compiled(_mlp())
        other.load_state_dict(torch.load(file))
        assert_steps(other, other, Engine(other, unseen="error"), _batches(4), _squares)

    def test_the_compiled_model_is_given_to_the_engine(self) -> None:
        model = _mlp()
        run = compiled(model)
        engine = Engine(run, unseen="error")
        assert_steps(model, run, engine, _batches(4, 4, 5), _squares)

    def test_deep_copy_of_what_is_compiled(self) -> None:
        model = _mlp()
        run = compiled(model)
        engine = Engine(model, unseen="error")
        assert_steps(model, run, engine, _batches(4), _squares)
        copied = copy.deepcopy(run)
        other = Engine(copied, unseen="error")
        assert_steps(copied._orig_mod, copied, other, _batches(4, 4), _squares)
        assert_steps(model, run, engine, _batches(4), _squares)

    def test_saved_as_a_whole(self) -> None:
        """What is loaded is not compiled, as without an engine."""
        model = _mlp()
        compile_inside(model)
        engine = Engine(model, unseen="error")
        assert_steps(model, model, engine, _batches(4), _squares)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        assert_steps(other, other, Engine(other, unseen="error"), _batches(4, 4), _squares)


class Switched(nn.Module):
    """A model whose graph depends on a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.slope = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), 1.0
        self.depth = 2

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            x = F.leaky_relu(layer(x), self.slope)
        return x


def test_recompilations() -> None:
    """In the middle of a training, and back to what was compiled before."""
    model = Switched()
    engine = Engine(model)
    run = compiled(model)
    with counted_parts() as parts:
        for depth, slope in ((2, 0.5), (1, 0.5), (2, 0.2), (1, 0.2), (2, 0.5)):
            model.depth, model.slope = depth, slope
            assert_steps(model, run, engine, _batches(4), _squares)
    assert len(parts) >= 2


def test_inputs_that_stay_in_their_place() -> None:
    """As CUDA graphs read them without a copy. Dynamo keeps the same note of them and of buffers.

    A buffer is no input, and may be as large as the batch.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model)
    x = torch.empty(4, 3)
    torch._dynamo.mark_static_address(x)
    for batch in _batches(4, 4, 4):
        x.copy_(batch[0])
        assert_steps(model, run, engine, [(x,)], _squares)


def test_threads() -> None:
    """Of a compiled model, which one thread compiles while others run backward passes."""
    model = _mlp()
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model)

    def work(number: int) -> None:
        for step in range(6):
            (batch,) = _batches(3 + step * number % 3)
            with engine.paused():
                jacobian = reference_jacobian(_squares(model(*batch), *batch), trainable(model))
            gramian = engine.compute_gramian(_squares(run(*batch), *batch))
            assert_close_to_reference(gramian, jacobian @ jacobian.T)

    with ThreadPoolExecutor(3, initializer=device_of_threads()) as pool:
        list(pool.map(work, range(3)))


def test_reset() -> None:
    """Losses from before a reset, and models that are compiled anew."""
    model = Decoder()
    engine = Engine(model, unseen="error")
    run = compiled(model)
    (ids,) = sequences(4, 6)
    with engine.paused():
        expected = language_losses(model(ids), ids)
    losses = language_losses(run(ids), ids)
    torch._dynamo.reset()
    assert_step(engine, losses, expected, trainable(model))
    assert_steps(model, run, engine, [sequences(4, 6)], language_losses)
