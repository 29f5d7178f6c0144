"""Series of steps of compiled models, against plain autograd on the model as it is."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import CoupledObjectivesWarning, Engine, MixedSamplesError
from autogram._capture.forward.recorder import Recorder
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import (
    INNER,
    Decoder,
    Images,
    assert_step,
    assert_steps,
    class_losses,
    compile_inside,
    compiled,
    counted_parts,
    language_losses,
    sequences,
)
from tests.unit.checks import (
    COUPLED,
    SCALAR,
    SECOND,
    SEVERAL,
    TABLE,
    Objectives,
    assert_close_to_reference,
    trainable,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("inner", INNER)
def test_sizes_change(inner: str) -> None:
    """Tied weights, and sequences of other numbers and lengths, by at most two graphs."""
    is_slow = inner == "inductor"
    model = Decoder(layers=1 if is_slow else 2)
    engine = Engine(model, unseen="error")
    sizes = [(4, 6), (5, 7), (4, 6), (4, 6), (4, 9), (3, 12)]
    batches = [sequences(*of) for of in sizes[: 2 if is_slow else None]]
    with counted_parts() as parts:
        assert_steps(model, compiled(model, inner), engine, batches, language_losses)
    assert len(parts) <= 3


def test_graph_break() -> None:
    """Several parts in one forward pass, and a parameter that is used in two of them.

    In a loop, so that the code between the parts is not seen: a part of it gets explicit rows.
    """
    model = Decoder(has_break=True)
    engine = Engine(model)
    batches = [sequences(4, 6), sequences(4, 6), sequences(5, 4)]
    with counted_parts() as parts:
        assert_steps(model, compiled(model), engine, batches, language_losses)
    assert len(parts) >= 2


class Broken(nn.Module):
    """Dynamo gives up a loop with a break in it, and compiles the layers one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


def test_all_layers_of_a_broken_loop() -> None:
    """Dynamo compiles a code a few times, and the hooks of all layers have the same."""
    model = Broken()
    engine = Engine(model, unseen="error")
    batches = [(torch.randn(4, 3),) for _ in range(2)]
    with counted_parts() as parts:
        assert_steps(model, compiled(model), engine, batches, lambda y, _: y.square().sum(1))
    assert len(parts) == len(model.layers)


@pytest.mark.parametrize("inner", INNER)
def test_blocks_share_a_graph(inner: str) -> None:
    """Twelve layers that are compiled each on its own, one after the other."""
    model = Decoder(layers=12)
    twin = copy.deepcopy(model)
    engine = Engine(model, unseen="error")
    for block in model.blocks:
        compile_inside(block, inner, fullgraph=True)
    with counted_parts() as parts:
        for size in (4, 4) if inner == "inductor" else (4, 4, 5):
            (ids,) = sequences(size, 6)
            losses, expected = (language_losses(m(ids), ids) for m in (model, twin))
            assert_step(engine, losses, expected, trainable(model), trainable(twin))
    assert len(parts) <= 2


def test_dropout() -> None:
    """The randomness is drawn once: the reference is the same graph, objective by objective."""
    model = Decoder(dropout=0.3)
    engine = Engine(model, unseen="error")
    run = compiled(model)
    for size in (4, 4, 5):
        (ids,) = sequences(size, 6)
        losses = language_losses(run(ids), ids)
        assert_step(engine, losses, losses, trainable(model))


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpoints(inner: str, dropout: float) -> None:
    is_slow = inner == "inductor"
    layers = 1 if is_slow else 2
    model = Decoder(layers, dropout, is_checkpointed=True)
    twin = Decoder(layers, dropout)
    twin.load_state_dict(model.state_dict())
    engine = Engine(model, unseen="error")
    run = compiled(model, inner)
    for size in (4, 4) if is_slow else (4, 4, 5):
        (ids,) = sequences(size, 6)
        losses = language_losses(run(ids), ids)
        if dropout:
            assert_step(engine, losses, losses, trainable(model))
        else:
            expected = language_losses(twin(ids), ids)
            assert_step(engine, losses, expected, trainable(model), trainable(twin))


@pytest.mark.parametrize("inner", INNER)
def test_images(inner: str) -> None:
    """Group normalisation, a convolution in groups, and activations in place."""
    model = Images()
    engine = Engine(model, unseen="error")
    sizes = (6, 6) if inner == "inductor" else (6, 6, 4, 5)
    batches = [(torch.randn(n, 3, 8, 8),) for n in sizes]
    assert_steps(model, compiled(model, inner), engine, batches, class_losses)


class TestBatchNormalisation:
    """Samples that meet are refused, or treated as coupled, as in eager mode."""

    def test_refused(self) -> None:
        model = Images(over_batch=True)
        engine = Engine(model, batch_dim=0)
        x = torch.randn(6, 3, 8, 8)
        losses = class_losses(compiled(model)(x), x)
        with pytest.raises(MixedSamplesError, match="The samples are mixed between"):
            engine.compute_gramian(losses)

    def test_coupled(self) -> None:
        model = Images(over_batch=True)
        twin = copy.deepcopy(model)
        engine = Engine(model)
        run = compiled(model)
        x = torch.randn(6, 3, 8, 8)
        jacobian = reference_jacobian(class_losses(twin(x), x), trainable(twin))
        with pytest.warns(CoupledObjectivesWarning):
            gramian = engine.compute_gramian(class_losses(run(x), x))
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        gramian = engine.compute_gramian(class_losses(run(x), x))
        assert_close_to_reference(gramian, jacobian @ jacobian.T)

    def test_in_evaluation(self) -> None:
        model = Images(over_batch=True).eval()
        engine = Engine(model, batch_dim=0, unseen="error")
        batches = [(torch.randn(n, 3, 8, 8),) for n in (6, 4)]
        assert_steps(model, compiled(model), engine, batches, class_losses)


def test_gradient_of_an_input_is_a_shown_cotangent() -> None:
    """What goes on from a part is the cotangent of its only use."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    model = nn.Sequential(nn.Linear(3, 4), Shift())
    engine = Engine(model, unseen="error")
    compile_inside(model[1])
    twin = nn.Sequential(nn.Linear(3, 4), Shift())
    twin.load_state_dict(model.state_dict())
    for size in (5, 5, 4):
        x = torch.randn(size, 3)
        losses, expected = (m(x).square().sum(1) for m in (model, twin))
        assert_step(engine, losses, expected, trainable(model), trainable(twin))


class Padded(nn.Module):
    """A convolution whose padding, stride and groups are given with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(4, 2, 3, 3)), nn.Linear(4, 2)

    def forward(self, x: Tensor, pad: Any, stride: Any) -> Tensor:
        x = nn.functional.conv2d(x, self.weight, padding=pad, stride=stride)
        found: Tensor = self.last(x.tanh().mean((2, 3)))
        return found


@pytest.mark.parametrize("is_pair", [True, False])
def test_symbolic_arguments_of_rules(is_pair: bool) -> None:
    """From the second number on, Dynamo has a symbol for it."""
    model = Padded()
    engine = Engine(model, unseen="error")
    batches = [
        (torch.randn(n, 2, 6, 6), (pad, 1) if is_pair else pad, stride)
        for n, pad, stride in ((4, 1, 1), (4, 2, 1), (3, 2, 2), (5, 3, 3), (5, 0, 1))
    ]
    with counted_parts() as parts:
        run = compiled(model)
        assert_steps(model, run, engine, batches, lambda y, *_: y.square().sum(1))
    assert len(parts) < len(batches)


def test_recorder_is_not_compiled() -> None:
    """Where Dynamo leaves a layer of PyTorch alone, it does not compile the recorder around it."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3))
    twin = copy.deepcopy(model)
    engine = Engine(model, unseen="error")
    for layer in model:
        compile_inside(layer)
    for size in (4, 2, 3):
        x = torch.randn(size, 2, 6, 6)
        losses, expected = (m(x).square().sum(1) for m in (model, twin))
        assert_step(engine, losses, expected, trainable(model), trainable(twin))
    assert Recorder.__torch_function__.__code__ not in torch._dynamo.convert_frame.input_codes


def test_part_of_a_model() -> None:
    """The engine is given some modules of a model that is compiled as a whole."""
    model = Decoder(is_tied=False)
    twin = copy.deepcopy(model)
    engine = Engine(model.blocks, model.head, unseen="error")
    run = compiled(model)
    inside, outside = ([*m.blocks.parameters(), *m.head.parameters()] for m in (model, twin))
    for _ in range(2):
        (ids,) = sequences(4, 6)
        expected = language_losses(twin(ids), ids)
        assert_step(engine, language_losses(run(ids), ids), expected, inside, outside)


@pytest.mark.parametrize("objectives", [SEVERAL, SECOND, TABLE, SCALAR, COUPLED], ids=repr)
def test_objectives(objectives: Objectives) -> None:
    """Several for a sample, and those that belong to no sample."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    engine = Engine(model, unseen="error", batch_dim=objectives.batch_dim)
    batches = [(torch.randn(4, 5),) for _ in range(3)]
    assert_steps(model, compiled(model), engine, batches, lambda y, _: objectives.of(y))


class WithLosses(nn.Module):
    """A model that returns its losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return language_losses(self.model(ids), ids)


def test_losses_inside() -> None:
    model = WithLosses(Decoder())
    engine = Engine(model, unseen="error")
    batches = [sequences(4, 6), sequences(5, 6)]
    assert_steps(model, compiled(model), engine, batches, lambda losses, _: losses)


def test_several_forward_passes() -> None:
    """Two calls of one part, behind the same losses."""
    model = Decoder()
    engine = Engine(model, unseen="error")
    run = compiled(model)
    for _ in range(2):
        (a,), (b,) = sequences(4, 6), sequences(4, 6)
        with engine.paused():
            expected = language_losses(model(a), a) + language_losses(model(b), b)
        losses = language_losses(run(a), a) + language_losses(run(b), b)
        assert_step(engine, losses, expected, trainable(model))


class Odd(nn.Module):
    """Weight normalisation, slices of one parameter, a call without a rule, and a break."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
        self.both = nn.Parameter(torch.randn(12, 8))
        self.slope = nn.Parameter(torch.rand(6))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.both.chunk(2)
        x = torch.tanh(self.first(x))
        x = nn.functional.linear(x, left) * nn.functional.linear(x, right)
        x = torch.atan2(x, self.slope)
        torch._dynamo.graph_break()
        found: Tensor = self.last(x)
        return found


@pytest.mark.cpu
@pytest.mark.parametrize("inner", INNER)
def test_derived_tensors_and_calls_without_a_rule(inner: str) -> None:
    model = Odd()
    engine = Engine(model)
    sizes = (4, 4) if inner == "inductor" else (4, 4, 6)
    batches = [(torch.randn(n, 5),) for n in sizes]
    assert_steps(model, compiled(model, inner), engine, batches, lambda y, _: y.square().sum(1))
    plans = {x.name: x.plan for x in engine.report().parameters}
    assert plans["slope"] == "rows"
    assert plans["both"] == "factors"


def test_ordinary_gradients_are_the_same() -> None:
    """Bit for bit, with an engine and without."""
    model = Decoder()
    run = compiled(model)
    (ids,) = sequences(4, 6)
    found: list[list[Any]] = []
    for _ in range(2):
        model.zero_grad()
        language_losses(run(ids), ids).sum().backward()
        found.append([p.grad for p in model.parameters()])
        engine = Engine(model)
        assert engine is not None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
