"""Gramians from inside of compiled backward passes."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autogram import Engine
from autogram._blocks import Limit, TracedKernels
from autogram._blocks.kernels import CpuKernels, CudaKernels
from autogram._capture.autograd.passes import Pass
from autogram._capture.backward.assembly import Assembly
from autogram._compiled import variants
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import (
    INNER,
    Decoder,
    Images,
    class_losses,
    compile_inside,
    compiled,
    language_losses,
    sequences,
)
from tests.unit.checks import assert_close_to_reference, trainable


@contextmanager
def shown_uses() -> Iterator[list[str]]:
    """Collects the functions of the uses whose cotangents leave a backward pass."""
    found: list[str] = []
    show = Pass.show

    def noted(self: Pass, use: Any, *rest: Any) -> None:
        found.append(use.function)
        show(self, use, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pass, "show", noted)
        yield found


def _assert_gramians(
    engine: Engine,
    losses: Callable[[], tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
    expected_shown: Sequence[str],
) -> None:
    """Assert that several steps are right, of which all but the first come from inside.

    Each step has a Gramian of its own and a fused step, on losses of their own.
    """
    for step in range(3):
        for is_fused in (False, True):
            own, plain = losses()
            jacobian = reference_jacobian(plain, parameters)
            with shown_uses() as shown:
                if is_fused:
                    _assert_fused(engine, own, jacobian, parameters)
                else:
                    gramian = engine.compute_gramian(own)
                    assert_close_to_reference(gramian, jacobian @ jacobian.T)
            if step:
                assert sorted(shown) == sorted(expected_shown)


def _assert_fused(
    engine: Engine, losses: Tensor, jacobian: Tensor, parameters: Sequence[Tensor]
) -> None:
    """Assert that a fused step has this Jacobian."""
    weights = torch.linspace(0.5, 2.0, len(losses)).to(losses)
    given: list[Tensor] = []
    for parameter in parameters:
        parameter.grad = None
    engine.backward(losses, lambda gramian: (given.append(gramian), weights)[1])
    assert_close_to_reference(given[0], jacobian @ jacobian.T)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    assert_close_to_reference(torch.cat([x.flatten() for x in found]), jacobian.T @ weights)


class Encoder(nn.Module):
    """Layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).mean(1))
        return found


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _squares(y: Tensor, _: Tensor) -> Tensor:
    return y.square().sum(1)


# What is not contracted inside: what is derived from a parameter, as rows of a table for positions.
MODELS: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "mlp": (_mlp, lambda: (torch.randn(5, 3),), _squares, []),
    "encoder": (Encoder, lambda: (torch.randn(4, 5, 8),), _squares, []),
    "images": (Images, lambda: (torch.randn(6, 3, 8, 8),), class_losses, []),
    "decoder": (
        lambda: Decoder(layers=1),
        lambda: sequences(4, 6),
        language_losses,
        ["add"],
    ),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", MODELS)
def test_steps(name: str, inner: str) -> None:
    make, batch_of, losses_of, shown = MODELS[name]
    model = make()
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model, inner)

    def losses() -> tuple[Tensor, Tensor]:
        batch = batch_of()
        with engine.paused():
            plain = losses_of(model(*batch), *batch)
        return losses_of(run(*batch), *batch), plain

    _assert_gramians(engine, losses, trainable(model), shown)


def test_verified_steps_are_shown() -> None:
    """A check looks at each parameter, and other products need factors."""
    model = _mlp()
    engine = Engine(model, verify="always")
    run = compiled(model)
    for _ in range(3):
        x = torch.randn(5, 3)
        with shown_uses() as shown:
            engine.compute_gramian(_squares(run(x), x))
        assert shown.count("linear") >= 2
        jacobian = engine.jacobian(_squares(run(x), x))
        assert jacobian.shape == (5, 26)


def test_several_objectives_are_shown() -> None:
    model = _mlp()
    engine = Engine(model, verify="never")
    run = compiled(model)

    def losses() -> tuple[Tensor, Tensor]:
        x = torch.randn(5, 3)
        with engine.paused():
            plain = model(x).square()
        return run(x).square(), plain

    for _ in range(3):
        own, plain = losses()
        jacobian = reference_jacobian(plain.flatten(), trainable(model))
        assert_close_to_reference(engine.compute_gramian(own), jacobian @ jacobian.T)


def test_used_in_several_parts() -> None:
    """A parameter of two calls has cross terms, which no part alone can have."""
    model = _mlp()
    engine = Engine(model, verify="never")
    run = compiled(model)

    def losses() -> tuple[Tensor, Tensor]:
        x, z = torch.randn(5, 3), torch.randn(5, 3)
        with engine.paused():
            plain = _squares(model(x) + model(z), x)
        return _squares(run(x) + run(z), x), plain

    _assert_gramians(engine, losses, trainable(model), ["linear"] * 4)


def test_layers_that_share_a_graph() -> None:
    """Each call of one graph has parameters of its own."""
    model = Decoder(layers=3)
    twin = copy.deepcopy(model)
    engine = Engine(model, unseen="error", verify="never")
    for block in model.blocks:
        compile_inside(block)

    def losses() -> tuple[Tensor, Tensor]:
        (ids,) = sequences(4, 6)
        own, plain = (language_losses(m(ids), ids) for m in (model, twin))
        return own, plain

    for _ in range(3):
        own, plain = losses()
        jacobian = reference_jacobian(plain, trainable(twin))
        with shown_uses() as shown:
            gramian = engine.compute_gramian(own)
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
    assert "linear" not in shown[2:]


def test_engines_of_different_parameters() -> None:
    """Of one use, one engine has the weight and the other one has both."""
    model = _mlp()
    whole, part = Engine(model, verify="never"), Engine(model, verify="never")
    run = compiled(model)
    part.hooks.deactivate(module=model[0])
    for _ in range(3):
        x = torch.randn(5, 3)
        losses = _squares(run(x), x)
        for engine, parameters in ((whole, model.parameters()), (part, model[2].parameters())):
            jacobian = reference_jacobian(losses, list(parameters))
            assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


def test_small_limit() -> None:
    """The contractions in the graph keep the limit of the engine."""
    model = Images()
    engine = Engine(model, unseen="error", verify="never", memory_limit_bytes=2**10)
    run = compiled(model)

    def losses() -> tuple[Tensor, Tensor]:
        x = torch.randn(6, 3, 8, 8)
        with engine.paused():
            plain = class_losses(model(x), x)
        return class_losses(run(x), x), plain

    _assert_gramians(engine, losses, trainable(model), [])


class Linear(nn.Linear):
    """A layer whose code is not PyTorch's, which Dynamo would leave alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_on_a_gpu(dtype: torch.dtype) -> None:
    """Products in half precision have results in float32, and no operand is copied into it."""
    equation, shapes = "kbto,bti->kboi", ((1, 4, 8, 6), (4, 8, 5))
    kernels = TracedKernels(CudaKernels(Limit(2**20)))
    with FakeTensorMode():
        operands = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]

        def contract(x: Tensor, y: Tensor) -> list[Tensor]:
            rows = kernels.rows(equation, (x, y))
            return [
                rows,
                kernels.gram(rows.flatten(2).squeeze(0)),
                kernels.einsum(equation, (x, y)),
            ]

        graph = make_fx(contract)(*operands).graph
    rows, gram, wide = [x.meta["val"] for x in graph.output_node().args[0]]
    assert (rows.dtype, gram.dtype, wide.dtype) == (dtype, torch.float32, torch.float32)
    casts = [node for node in graph.nodes if node.target is torch.ops.aten._to_copy.default]
    assert [node.meta["val"].numel() for node in casts if node.meta["val"].numel() > 16] == []


def test_convolutions_whose_samples_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device prefers the gradient of a convolution to patches, so does the graph."""
    monkeypatch.setattr(CpuKernels, "prefers_adjoint", lambda *_: True)
    model = Images()
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model)

    def losses() -> tuple[Tensor, Tensor]:
        x = torch.randn(6, 3, 8, 8)
        with engine.paused():
            plain = class_losses(model(x), x)
        return class_losses(run(x), x), plain

    _assert_gramians(engine, losses, trainable(model), [])


@pytest.mark.parametrize("room", [1, 3])
def test_rows_that_are_larger_than_factors(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Equal parts share a graph, and keep larger rows while there is room for them."""
    model = nn.Sequential(*(Linear(12, 12) for _ in range(3)))
    twin = copy.deepcopy(model)
    samples, positions = 32, 4
    larger = samples * 12 * 12  # the factors have samples * positions * (12 + 12) elements
    engine = Engine(model, verify="never", memory_limit_bytes=4 * (room * larger + 1))
    for layer in model:
        compile_inside(layer)
    kept: list[int] = []
    take = Assembly.take_part

    def noted(self: Assembly, *args: Any) -> None:
        kept.append(args[-1])
        take(self, *args)

    monkeypatch.setattr(Assembly, "take_part", noted)
    for step in range(3):
        x = torch.randn(samples, positions, 12)
        own, plain = (m(x).tanh().square().sum((1, 2)) for m in (model, twin))
        jacobian = reference_jacobian(plain, trainable(twin))
        kept.clear()
        _assert_fused(engine, own, jacobian, trainable(model))
        assert step == 0 or kept == [larger] * room + [0] * (3 - room)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("mlp", "aot_eager"),
        ("encoder", "aot_eager"),
        ("images", "aot_eager"),
        pytest.param("images", "inductor", marks=pytest.mark.slow),
    ],
)
def test_open_sizes(name: str, inner: str) -> None:
    """Sizes that occur again get a graph of their own, in which contractions are."""
    make, _, losses_of, _ = MODELS[name]
    shape = {"mlp": (3,), "encoder": (5, 8), "images": (3, 8, 8)}[name]
    model = make()
    engine = Engine(model, unseen="error", verify="never")
    run = compiled(model, inner, dynamic=True)
    parameters = trainable(model)
    seen: set[int] = set()
    for size in (4, 6, 6, 4, 5, 4, 6):
        x = torch.randn(size, *shape)
        with engine.paused():
            plain = losses_of(model(x), x)
        jacobian = reference_jacobian(plain, parameters)
        losses = losses_of(run(x), x)
        with shown_uses() as shown:
            _assert_fused(engine, losses, jacobian, parameters)
        assert bool(shown) == (size not in seen)
        seen.add(size)


def test_sizes_that_never_occur_again() -> None:
    """No graph is made for them, and few for sizes that occur again."""
    model = _mlp()
    engine = Engine(model, verify="never")
    run = compiled(model, dynamic=True)
    inside = []
    for size in [x for first in (5, 8, 11, 14) for x in (*range(first, first + 3),) * 2]:
        x = torch.randn(size, 3)
        jacobian = reference_jacobian(_squares(model(x), x), trainable(model))
        with shown_uses() as shown:
            _assert_fused(engine, _squares(run(x), x), jacobian, trainable(model))
        inside.append(not shown)
    assert inside == ([False] * 3 + [True] * 3) * 2 + [False] * 3 + [True] * 2 + [False] * 7


def test_what_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine contracts it, as ever."""

    def fail(*args: object) -> None:
        raise RuntimeError(f"no {len(args)}")

    monkeypatch.setattr(variants, "append_contractions", fail)
    model = _mlp()
    engine = Engine(model, verify="never")
    run = compiled(model)

    def losses() -> tuple[Tensor, Tensor]:
        x = torch.randn(5, 3)
        with engine.paused():
            plain = _squares(model(x), x)
        return _squares(run(x), x), plain

    _assert_gramians(engine, losses, trainable(model), ["linear"] * 2)


def test_a_fused_step_makes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the engine's parameters wants a gradient."""
    model = _mlp()
    engine = Engine(model, verify="never")
    run = compiled(model)
    passes: list[int] = []
    call = variants.Backward.__call__

    def counted(self: variants.Backward, args: list[Any]) -> Any:
        passes.append(1)
        return call(self, args)

    monkeypatch.setattr(variants.Backward, "__call__", counted)
    for step in range(3):
        x = torch.randn(5, 3)
        losses = _squares(run(x), x)
        passes.clear()
        engine.backward(losses, lambda gramian: torch.ones(len(gramian)))
        assert step == 0 or len(passes) == 1
