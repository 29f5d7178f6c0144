"""What contractions inside of compiled parts choose: dtypes, ways, rows or factors, sizes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autogram import Engine
from autogram._blocks import Limit
from autogram._blocks.kernels import CpuKernels, TracedCpuKernels, TracedCudaKernels
from autogram._blocks.kernels.paths import Prices
from autogram._capture.backward.assembly import Assembly
from autogram._compiled.variants import Backward
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import (
    INNER,
    Images,
    assert_step,
    class_losses,
    compile_inside,
    compiled,
)
from tests.unit._compiled.inside import (
    MODELS,
    assert_fused,
    assert_gramians,
    mlp,
    shown_uses,
    squares,
)
from tests.unit.checks import trainable

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_on_a_gpu(dtype: torch.dtype) -> None:
    """Products in half precision have results in float32, and no operand is copied into it."""
    equation, shapes = "kbto,bti->kboi", ((1, 4, 8, 6), (4, 8, 5))
    kernels = TracedCudaKernels(Limit(2**20))
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

    assert_gramians(engine, losses, trainable(model), [])


@pytest.mark.cpu
@pytest.mark.parametrize("inner", INNER)
def test_products_of_half_of_the_samples(monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    """Where a device leaves out what is the mirror of another part, so does the graph."""
    parts: list[int] = []

    def with_copy(_: CpuKernels, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        parts.append(len(operands))
        return operands

    prices = Prices(memory=16, mirror=0, thin=2)
    monkeypatch.setattr(CpuKernels, "prices", lambda *_: prices)
    monkeypatch.setattr(TracedCpuKernels, "with_copy", with_copy)
    model = nn.Sequential(nn.Linear(9, 8, bias=False), nn.Tanh(), nn.Linear(8, 7))
    engine = Engine(model, verify="never")
    run = compiled(model, inner)

    def losses() -> tuple[Tensor, Tensor]:
        x = torch.randn(7, 2, 9)
        with engine.paused():
            plain = model(x).square().sum((1, 2))
        return run(x).square().sum((1, 2)), plain

    assert_gramians(engine, losses, trainable(model), [])
    assert parts


class Linear(nn.Linear):
    """A layer whose code is not PyTorch's, which Dynamo would leave alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.cpu
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

    def noted(self: Assembly, *args: Any, taken: int, **options: Any) -> None:
        kept.append(taken)
        take(self, *args, taken=taken, **options)

    monkeypatch.setattr(Assembly, "take_part", noted)
    for step in range(3):
        x = torch.randn(samples, positions, 12)
        own, plain = (m(x).tanh().square().sum((1, 2)) for m in (model, twin))
        jacobian = reference_jacobian(plain, trainable(twin))
        kept.clear()
        assert_fused(engine, own, jacobian, trainable(model))
        assert step == 0 or kept == [larger] * room + [0] * (3 - room)


@pytest.mark.nightly
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
            assert_fused(engine, losses, jacobian, parameters)
        assert bool(shown) == (size not in seen)
        seen.add(size)


def test_sizes_that_never_occur_again() -> None:
    """No graph is made for them, and few for sizes that occur again."""
    model = mlp()
    engine = Engine(model, verify="never")
    run = compiled(model, dynamic=True)
    inside = []
    for size in [x for first in (5, 8, 11, 14) for x in (*range(first, first + 3),) * 2]:
        x = torch.randn(size, 3)
        jacobian = reference_jacobian(squares(model(x), x), trainable(model))
        with shown_uses() as shown:
            assert_fused(engine, squares(run(x), x), jacobian, trainable(model))
        inside.append(not shown)
    assert inside == ([False] * 3 + [True] * 3) * 2 + [False] * 3 + [True] * 2 + [False] * 7


class Hypotenuse(nn.Module):
    """A parameter in a call without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The root of the sum of squares."""
        return torch.hypot(x, self.other)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::autogram.CompiledPartWarning")
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("has_rules", [True, False])
def test_images_of_many_sizes(inner: str, has_rules: bool) -> None:
    """What a compiler asks of sizes, as inductor does for convolutions, holds in all calls."""
    middle = nn.Tanh() if has_rules else Hypotenuse()
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), middle, nn.Conv2d(4, 2, 3))
    engine = Engine(model, verify="never")
    run = compiled(model, inner)
    for size in (8, 8, 9, 9, 5, 7, 9, 8):
        x = torch.randn(4, 3, size, size)
        with engine.paused():
            plain = model(x).square().flatten(1).sum(1)
        assert_step(engine, run(x).square().flatten(1).sum(1), plain, trainable(model))


def test_a_variant_for_engines_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs uncompiled, and training without an engine does not notice."""
    make = Backward._with_taps

    def with_taps(backward: Backward, *args: Any) -> Any:
        if backward._is_guarded:  # it would be compiled
            raise RuntimeError("This graph cannot be compiled.")
        return make(backward, *args)

    monkeypatch.setattr(Backward, "_with_taps", with_taps)
    model = mlp()
    engine = Engine(model, verify="never")
    run = compiled(model, dynamic=True)
    for size in (4, 6, 5):
        x = torch.randn(size, 3)
        with engine.paused():
            plain = squares(model(x), x)
        squares(run(x), x).sum().backward()
        assert_step(engine, squares(run(x), x), plain, trainable(model))
