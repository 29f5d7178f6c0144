"""Results under autocast: in float32 at least, and as exact as outside of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchjd.aggregation import UPGradWeighting

from autogram import Engine, Jacobian
from tests.unit.checks import features
from tests.unit.engines import batch, mlp, per_sample
from tests.unit.environment import DEVICE

HALF = [torch.bfloat16, torch.float16]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.fixture(params=HALF, ids=str)
def half(request: pytest.FixtureRequest) -> torch.dtype:
    """What autocast computes in."""
    return request.param


def deep() -> nn.Module:
    """Small and large layers: their columns are contracted in bundles, and alone."""
    return nn.Sequential(
        nn.Linear(6, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.LayerNorm(64),
        nn.Linear(64, 3),
    )


class Seen:
    """A weighting that tells what it was called with."""

    def __init__(self, of: Callable[[Tensor], Tensor] = lambda gramian: gramian.mean(1)) -> None:
        self.of = of
        self.gramians: list[Tensor] = []
        self.autocast: list[bool] = []

    def __call__(self, gramian: Tensor) -> Tensor:
        self.gramians.append(gramian)
        self.autocast.append(torch.is_autocast_enabled(DEVICE))
        return self.of(gramian)


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("parameters", DTYPES)
@pytest.mark.parametrize("make_model", [mlp, deep])
def test_fused_step_inside_as_outside(
    make_model: Callable[[], nn.Module], parameters: str, each: int, half: torch.dtype
) -> None:
    """The same Gramian, weights and gradients, bit for bit, over several steps."""
    dtype = DTYPES[parameters]
    model = make_model().to(dtype)
    results = []
    for is_inside in (True, False):
        engine = Engine(model)  # first steps are compared with first steps
        torch.manual_seed(1)
        weighting, found = Seen(), []
        for _ in range(3):
            model.zero_grad()
            with torch.autocast(DEVICE, dtype=half):
                losses = features(
                    model(batch(5, next(model.parameters()).shape[1]).to(dtype)), each
                )
                if is_inside:
                    found += engine.backward(losses, weighting, return_gramian=True)
            if not is_inside:
                found += engine.backward(losses, weighting, return_gramian=True)
            found += [p.grad for p in model.parameters()]
        assert weighting.autocast == [False] * 3
        assert {gramian.dtype for gramian in weighting.gramians} == {dtype}
        assert {x.dtype for x in found} == {dtype}
        results.append(found)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("call", ["backward", "accumulate"])
def test_other_leaves_inside_as_outside(call: str, half: torch.dtype) -> None:
    """Leaves that are no part of J get the same gradient, by a pass in the dtypes of the graph."""
    model = mlp().float()
    x, gradients = batch(5, 3).float().requires_grad_(), []
    for is_inside in (True, False):
        engine = Engine(model)
        x.grad = None
        losses = per_sample(model(x))
        with torch.autocast(DEVICE, dtype=half, enabled=is_inside):
            if call == "backward":
                engine.backward(losses, Seen())
            else:
                with engine.accumulate(Seen()) as step:
                    step.add(losses)
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_entries_above_the_range_of_float16() -> None:
    """Products of gradients: each fits into float16, and their squares do not."""
    model = nn.Linear(3, 1, bias=False).float()
    engine = Engine(model)
    for _ in range(3):
        with torch.autocast(DEVICE, dtype=torch.float16):
            losses = model(torch.full((2, 3), 1000.0, dtype=torch.float32)).squeeze(1)
            weights, gramian = engine.backward(
                losses, lambda gramian: gramian.diagonal().rsqrt(), return_gramian=True
            )
        expected = torch.full((2, 2), 3e6, dtype=torch.float32)
        assert torch.equal(gramian, expected)
        torch.testing.assert_close(weights, expected.diagonal().rsqrt(), rtol=1e-6, atol=0)


def test_weighting_of_torchjd(half: torch.dtype) -> None:
    """Its solver takes no half precision."""
    model = deep().float()
    engine = Engine(model)
    for _ in range(3):
        with torch.autocast(DEVICE, dtype=half):
            losses = per_sample(model(batch(5, 6).float()))
            weights, gramian = engine.backward(losses, UPGradWeighting(), return_gramian=True)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights, UPGradWeighting()(gramian))


@pytest.mark.parametrize("given", HALF, ids=str)
def test_weights_in_half_precision_are_promoted(given: torch.dtype) -> None:
    """What a weighting returns may be rounded; what the engine returns has float32 at least."""
    model = mlp().float()
    engine = Engine(model)
    losses = per_sample(model(batch(5, 3).float()))
    weights = engine.backward(losses, lambda gramian: gramian.mean(1).to(given))
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.to(given).float())


def test_no_losses(half: torch.dtype) -> None:
    model = mlp().to(half)
    engine = Engine(model)
    losses = model(batch(0, 3).to(half))
    with torch.autocast(DEVICE, dtype=half):
        weights, gramian = engine.backward(losses, Seen(), return_gramian=True)
    assert weights.dtype == gramian.dtype == torch.float32


def products(jacobian: Jacobian, model: nn.Module) -> dict[str, Any]:
    """Every product of a Jacobian."""
    m = jacobian.shape[0]
    places = torch.arange(1.0, m + 1, dtype=torch.float32).sin()
    return {
        "gramian": jacobian.gramian(),
        **{f"block {k}": x for k, x in jacobian.block_gramians().items()},
        "row_norms": jacobian.row_norms(),
        **{f"vjp {k}": x for k, x in jacobian.vjp(places).items()},
        **{f"vjps {k}": x for k, x in jacobian.vjp(torch.stack([places, -places])).items()},
        "jvp": jacobian.jvp([p.detach().cos() for p in model.parameters()]),
        "cross_gramian": jacobian.cross_gramian(jacobian),
        **{f"rows {k}": x for k, x in jacobian.rows([0, 2]).items()},
        "dense": jacobian.dense(),
    }


@pytest.mark.parametrize("keep", ["auto", "factors", "rows"])
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("cast", [False, True], ids=["float32 parameters", "half parameters"])
def test_products_inside_as_outside(each: int, cast: bool, half: torch.dtype, keep: Any) -> None:
    """The Jacobian is made inside of autocast, and multiplied inside and outside."""
    model = deep().float()
    model = model.to(half) if cast else model
    engine = Engine(model)
    for _ in range(2):
        with torch.autocast(DEVICE, dtype=half):
            losses = features(model(batch(5, 6).to(next(model.parameters()).dtype)), each)
            jacobian = engine.jacobian(losses, keep=keep)
            inside = products(jacobian, model)
        outside = products(jacobian, model)
        assert {x.dtype for x in inside.values()} == {torch.float32}
        assert all(torch.equal(inside[name], outside[name]) for name in outside)
