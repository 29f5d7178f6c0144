"""Walks through the autograd graph."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import Engine
from autogram._capture.autograd.graph import dtypes_of, nodes_behind
from tests.unit.engines import batch, mlp, per_sample
from tests.unit.environment import DEVICE

DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16


class Rounded(torch.autograd.Function):
    """A result in another dtype."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        del ctx
        return x.to(SINGLE)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        del ctx
        return g.to(DOUBLE)


def dtypes_behind(x: Tensor) -> set[torch.dtype]:
    return dtypes_of(x, nodes_behind(x))


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast(DEVICE, dtype=HALF):
        return F.linear(x.to(SINGLE), torch.ones(2, x.shape[1], dtype=SINGLE, requires_grad=True))


COMPUTATIONS: dict[str, tuple[Callable[[Tensor], Tensor], set[torch.dtype]]] = {
    "one dtype": (lambda x: x.sin().exp(), {DOUBLE}),
    "a cast forth and back": (lambda x: x.to(SINGLE).sin().to(DOUBLE), {DOUBLE, SINGLE}),
    "a cast in a call": (lambda x: torch.softmax(x, 1, dtype=SINGLE), {SINGLE}),
    "the same, and back": (lambda x: F.softmax(x, 1, dtype=SINGLE).type_as(x), {DOUBLE, SINGLE}),
    "a sum": (lambda x: x.to(HALF).sum(1, dtype=DOUBLE), {DOUBLE, HALF}),
    "a custom function": (lambda x: Rounded.apply(x).to(DOUBLE), {DOUBLE, SINGLE}),
    "several results": (lambda x: x.to(HALF).unbind()[1].to(DOUBLE), {DOUBLE, HALF}),
    "autocast": (lambda x: under_autocast(x).to(DOUBLE), {DOUBLE, SINGLE, HALF}),
    "complex numbers": (lambda x: torch.fft.fft(x).abs(), {DOUBLE, torch.complex128}),
    "integers": (lambda x: (x * x.long())[x[:, 0].argsort()], {DOUBLE}),
    "aside": (lambda x: x * x.detach().to(SINGLE).to(DOUBLE), {DOUBLE}),
    "a checkpoint": (
        lambda x: checkpoint(lambda y: y.to(SINGLE).sin().to(DOUBLE), x, use_reentrant=False),
        {DOUBLE, SINGLE},
    ),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_dtypes_in_which_something_was_computed(name: str) -> None:
    compute, expected = COMPUTATIONS[name]
    x = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    assert dtypes_behind(compute(x)) == expected


def test_leaves_have_no_part_in_it() -> None:
    """Nor have engines, whose anchors are leaves."""
    assert dtypes_behind(torch.ones(2, dtype=DOUBLE, requires_grad=True).sum()) == {DOUBLE}
    torch.set_default_dtype(SINGLE)
    model = mlp().to(DOUBLE)
    Engine(model)
    assert dtypes_behind(per_sample(model(batch(4, 3).to(DOUBLE)))) == {DOUBLE}


def test_norms_in_one_dtype() -> None:
    """Fused or not."""
    for norm in (nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)):
        x = batch(3, 4).to(DOUBLE).requires_grad_()
        assert dtypes_behind(norm.to(DOUBLE)(x)) == {DOUBLE}
