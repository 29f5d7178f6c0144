"""Parameters that a call broadcasts over the samples: expanded, with no further backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit._capture.seen import left_to_fallback, seen_uses
from tests.unit._compiled.compiling import compiled
from tests.unit.checks import (
    assert_close_to_reference,
    assert_same_but_for_last_bits,
    assert_same_numbers,
    irregular,
    trainable,
)
from tests.unit.engines import assert_exact, batch, per_sample
from tests.unit.environment import DEVICE

SAMPLES, HEADS, LENGTH, WIDTH = 4, 2, 5, 6


class Attention(nn.Module):
    """Attention of a linear layer's results, with one more parameter."""

    def __init__(self, attend: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, HEADS * WIDTH)
        self.parameter = nn.Parameter(batch(*shape))
        self._attend = attend

    def forward(self, x: Tensor) -> Tensor:
        """Maps samples ``(n, length, 3)`` to samples."""
        heads = self.layer(x).view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
        return self._attend(heads, self.parameter).flatten(1)


def biased(x: Tensor, bias: Tensor, **options: Any) -> Tensor:
    """With a bias of the scores."""
    return F.scaled_dot_product_attention(x, x.sin(), x.cos(), bias, **options)


def relative(x: Tensor, table: Tensor) -> Tensor:
    """With a bias by the distance of positions, in each of two calls."""
    positions = torch.arange(x.shape[-2])
    distances = (positions[:, None] - positions).abs().clamp(max=len(table) - 1)
    bias = table[distances].permute(2, 0, 1).unsqueeze(0)
    return biased(biased(x, bias), bias)


def in_windows(x: Tensor, bias: Tensor) -> Tensor:
    """With the windows of all samples in one dimension."""
    windows = x.unfold(2, 2, 1).movedim(-1, 3).transpose(1, 2).flatten(0, 1)  # (n * 4, heads, 2, w)
    return biased(windows, bias).unflatten(0, (len(x), -1))


def masked(x: Tensor, bias: Tensor) -> Tensor:
    """With the mask of padded sequences, added to the bias: a tensor of the samples."""
    ends = torch.arange(len(x)).clamp(1, LENGTH)
    mask = torch.arange(LENGTH) < ends[:, None]
    return biased(x, bias.masked_fill(~mask[:, None, None], -torch.inf))


def by_learned_queries(x: Tensor, queries: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(queries, x, x.sin())


def by_learned_keys(x: Tensor, keys: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, keys, keys.sin())


def grouped(x: Tensor, bias: Tensor) -> Tensor:
    """One head of keys for all heads of queries."""
    shared = x[:, :1].sin()
    return F.scaled_dot_product_attention(x, shared, shared, bias, enable_gqa=True)


def of_learned_groups(x: Tensor, keys: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, keys, keys.sin(), enable_gqa=True)


def to_a_power(x: Tensor, power: Tensor) -> Tensor:
    """Generalised means over positions."""
    return (x.square() + 0.1).pow(power).mean(2).pow(1 / power)


def powers_in_place(x: Tensor, power: Tensor) -> Tensor:
    y = x.square() + 0.1
    y **= power
    return y.sin().lerp_(power.to(y.dtype), 0.3)


def powers(x: Tensor, power: Tensor) -> Tensor:
    base = x.square() + 0.1
    return base**power + power.abs() ** base


def between(x: Tensor, p: Tensor) -> Tensor:
    p = p.to(x.dtype)
    return torch.lerp(p, x, p.sigmoid()) + x.lerp(x.sin(), p)


def products_added(x: Tensor, p: Tensor) -> Tensor:
    p = p.to(x.dtype)
    return torch.addcmul(p, x, p.sin(), value=0.5) + x.addcdiv(p, p.exp())


def similar(x: Tensor, p: Tensor) -> Tensor:
    """To each of some prototypes."""
    near = F.pairwise_distance(x.unsqueeze(3), p)
    return F.cosine_similarity(p, x.unsqueeze(3), dim=-1) + near


def turned(x: Tensor, p: Tensor) -> Tensor:
    x = x.to(p.dtype)  # there are no complex numbers of half precision
    return (torch.complex(x, p) * torch.polar(p.exp(), x)).abs()


CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "a bias": (biased, (LENGTH, LENGTH)),
    "a bias by head": (biased, (HEADS, LENGTH, LENGTH)),
    "a bias with a dimension for samples": (biased, (1, HEADS, LENGTH, LENGTH)),
    "a bias of keys": (biased, (1, LENGTH)),
    "a bias for each sample": (biased, (SAMPLES, 1, LENGTH, LENGTH)),
    "with dropout": (partial(biased, dropout_p=0.4), (LENGTH, LENGTH)),
    "a table of distances": (relative, (4, HEADS)),
    "windows": (in_windows, (HEADS, 2, 2)),
    "padded": (masked, (HEADS, LENGTH, LENGTH)),
    "queries of all samples": (
        lambda x, q: by_learned_queries(x, q.expand(len(x), -1, -1, -1) * 2),
        (1, HEADS, 3, WIDTH),
    ),
    "keys and values of all samples": (
        lambda x, k: by_learned_keys(x, k.expand(len(x), -1, -1, -1) * 2),
        (HEADS, 3, WIDTH),
    ),
    "a bias for groups": (grouped, (HEADS, LENGTH, LENGTH)),
    "keys for groups": (
        lambda x, k: of_learned_groups(x, k.expand(len(x), -1, -1, -1) * 2),
        (1, 1, 3, WIDTH),
    ),
    "a power": (to_a_power, ()),
    "powers": (powers, (WIDTH,)),
    "powers in place": (powers_in_place, (WIDTH,)),
    "bounds": (
        lambda x, p: torch.maximum(x, p[0]).clamp(max=p[1]).fmin(p[0] + 1),
        (2, HEADS, 1, 1),
    ),
    "between": (between, (LENGTH, 1)),
    "products added": (products_added, (WIDTH,)),
    "prototypes": (similar, (3, WIDTH)),
    "axes": (lambda x, p: torch.linalg.cross(x[..., :3], p.to(x.dtype)), (1, 1, 1, 3)),
    "logarithms": (lambda x, p: torch.special.xlog1py(x.contiguous(), p.exp()), (WIDTH,)),
    "complex numbers": (turned, (WIDTH,)),
    "angles": (
        lambda x, p: torch.atan2(x, p) * torch.hypot(p, x) + torch.logaddexp(x, p),
        (WIDTH,),
    ),
}


def model_of(name: str) -> Attention:
    attend, shape = CASES[name]
    return Attention(attend, *shape)


@pytest.mark.parametrize("name", CASES)
def test_no_further_backward_pass(name: str) -> None:
    """Series of steps with other numbers of samples, where the parameter is not of the samples."""
    model = model_of(name)
    engine = Engine(model, verify="never")
    for samples in (SAMPLES, SAMPLES, SAMPLES if "each sample" in name else 3, SAMPLES):
        with seen_uses() as uses:
            losses = per_sample(model(batch(samples, LENGTH, 3)))
        assert_exact(engine, losses, model)
        assert not left_to_fallback(uses)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_without_an_engine(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, with the same random numbers; and so are ordinary gradients.

    The gradient of a power has powers of the expanded exponent, which fill vectors where those of
    one number for all samples do not. So their last bits may differ.

    In bfloat16 by autocast, which rounds what a call reads. There, attention may add up the samples
    in float32, so that the gradient of its bias is rounded otherwise.
    """
    is_half = dtype == torch.bfloat16
    wide = torch.float32 if is_half else dtype
    model, x = model_of(name).to(wide), batch(SAMPLES, LENGTH, 3).to(wide)
    found = []
    for has_engine in (False, True):
        engine = Engine(model) if has_engine else None
        torch.manual_seed(0)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=is_half):
            output = model(x)
        model.zero_grad()
        output.square().sum().backward()
        found.append([output.detach(), *[p.grad for p in trainable(model)]])
        del engine
    plain, ours = found
    assert torch.equal(ours[0], plain[0])
    for gradient, expected in zip(ours[1:], plain[1:], strict=True):
        if is_half and name == "a table of distances":
            torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=0.1)
        elif "power" in name:
            assert_same_but_for_last_bits(gradient, expected)
        else:
            assert_same_numbers(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_powers_in_float64(dtype: torch.dtype) -> None:
    """The call casts: the gradient of the power is a sum in float64, rounded once."""
    model = Attention(lambda x, power: (x.square() + 0.1).float_power(power), 1, 1, WIDTH).to(dtype)
    x, found = batch(SAMPLES, LENGTH, 3).to(dtype), []
    for has_engine in (False, True):
        engine = Engine(model) if has_engine else None
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), [model.parameter], retain_graph=True)
        found.append([output.detach(), gradient])
        if engine is not None and dtype == torch.float64:
            assert_exact(engine, per_sample(output), model)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", CASES)
def test_in_a_checkpoint(name: str) -> None:
    model = model_of(name)
    engine, weights = Engine(model), irregular(SAMPLES)
    for _ in range(2):
        model.zero_grad()
        losses = per_sample(checkpoint(model, batch(SAMPLES, LENGTH, 3), use_reentrant=False))
        jacobian = reference_jacobian(losses, trainable(model))
        engine.backward(losses, lambda _: weights)
        flat = torch.cat([p.grad.flatten() for p in trainable(model) if p.grad is not None])
        assert_close_to_reference(flat, weights @ jacobian)


@pytest.mark.parametrize("name", CASES)
def test_in_a_checkpoint_of_a_function(name: str) -> None:
    """Which runs again where nothing is recorded, and saves what it saved before."""
    model = model_of(name)
    forward = model.forward
    model.forward = partial(checkpoint, forward, use_reentrant=False)  # type: ignore[method-assign]
    engine = Engine(model)
    for _ in range(2):
        losses = per_sample(model(batch(SAMPLES, LENGTH, 3)))
        losses.sum().backward(retain_graph=True)
        assert_exact(engine, losses, model)


@pytest.mark.cpu
@pytest.mark.parametrize("name", [name for name in CASES if name != "with dropout"])
def test_compiled(name: str) -> None:
    """Without rows of the whole part, where what is read can be computed again."""
    model = model_of(name)
    engine, run = Engine(model, verify="never"), compiled(model)
    for _ in range(3):
        assert_exact(engine, per_sample(run(batch(SAMPLES, LENGTH, 3))), model)
    assert "compiled part" not in str(engine.report())


def test_a_report_names_the_call() -> None:
    model = model_of("a bias")
    engine = Engine(model)
    engine.compute_gramian(per_sample(model(batch(SAMPLES, LENGTH, 3))))
    text = str(engine.report())
    assert "scaled_dot_product_attention" in text
    assert "fallback" not in text


@pytest.mark.parametrize(
    "call",
    [
        lambda x, p: F.scaled_dot_product_attention(x, x[:2], x, p),
        lambda x, p: F.scaled_dot_product_attention(x, x, attn_mask=p),
        lambda x, p: torch.maximum(x[..., :2], p),
    ],
)
def test_wrong_arguments_raise_the_errors_of_the_call(call: Callable[..., Tensor]) -> None:
    model, x = Attention(call, LENGTH, LENGTH), batch(SAMPLES, LENGTH, 3)
    errors = []
    for has_engine in (False, True):
        engine = Engine(model) if has_engine else None
        with pytest.raises((RuntimeError, TypeError)) as caught:
            model(x)
        errors.append((caught.type, str(caught.value)))
        del engine
    assert errors[0] == errors[1]


def test_complex_numbers_from_a_parameter() -> None:
    def raised(x: Tensor, p: Tensor) -> Tensor:
        return torch.pow(torch.complex(x, x.sin()) + 2, torch.view_as_complex(p)).abs()

    model = Attention(raised, WIDTH, 2)
    engine = Engine(model, verify="never")
    for _ in range(2):
        assert_exact(engine, per_sample(model(batch(SAMPLES, LENGTH, 3))), model)
