"""Recipes: what a rule computes of half-precision tensors, and letters for dimensions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autogram.rules import find_rule, positions, promoted


def normal(*shape: int) -> Tensor:
    """Random numbers that half precision has."""
    return torch.randn(shape, dtype=torch.bfloat16).double()


def parameter(*shape: int) -> Tensor:
    """The same as a parameter, away from zero."""
    return normal(*shape).abs().add(1).bfloat16().double().requires_grad_()


# Calls whose blocks have factors that are computed, from tensors that half precision has.
COMPUTED = {
    "layer_norm": (F.layer_norm, lambda: (normal(3, 4), (4,), parameter(4), parameter(4))),
    "rms_norm": (F.rms_norm, lambda: (normal(3, 4), (4,), parameter(4), 1e-5)),
    "group_norm": (F.group_norm, lambda: (normal(3, 4, 5), 2, parameter(4), parameter(4))),
    "batch_norm": (
        torch.batch_norm,
        lambda: (normal(3, 4), parameter(4), parameter(4), None, None, True, 0.1, 1e-5, False),
    ),
    "running": (
        torch.batch_norm,
        lambda: (
            *(normal(3, 4), parameter(4), parameter(4), normal(4), parameter(4).detach()),
            *(False, 0.1, 1e-5, False),
        ),
    ),
    "numerator": (torch.div, lambda: (parameter(4), parameter(3, 4).detach())),
    "denominator": (torch.div, lambda: (normal(3, 4), parameter(4))),
    "scale": (torch.Tensor.sub, lambda: (normal(3, 4), parameter(4))),
    "gru_cell": (
        torch.gru_cell,
        lambda: (
            *(normal(3, 4), normal(3, 2), parameter(6, 4), parameter(6, 2)),
            *(parameter(6), parameter(6)),
        ),
    ),
}


def rows(function: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
    """The rows of a call whose tensors have some dtype, with factors multiplied in float64."""
    given = [x.to(dtype) if isinstance(x, Tensor) else x for x in args]
    rule = find_rule(function)
    assert rule is not None
    found = []
    for recipe in rule(*given) or ():
        torch.manual_seed(0)
        shape = function(*args).shape
        cotangent = normal(2, *shape).to(dtype)
        saved = [x.detach() for x in recipe.saved]
        for block in recipe.formula.blocks(None, cotangent, *saved):
            factors = [x.double() for x in block.operands]
            found.append(torch.einsum(block.equation, *factors))
    return found


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_factors_keep_their_digits(name: str) -> None:
    """They have those of float32 at least, also where all that they are computed from has fewer."""
    function, make = COMPUTED[name]
    args = make()
    expected = rows(function, args, torch.float64)
    found = rows(function, args, torch.bfloat16)
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_promotion() -> None:
    """Indices and masks stay as they are."""
    half, index = torch.ones(2, dtype=torch.float16), torch.arange(2)
    assert [x.dtype for x in promoted(half, index)] == [torch.float32, torch.int64]
    assert [x.dtype for x in promoted(half, half.double())] == [torch.float64] * 2


def test_letters() -> None:
    """No two dimensions of a tensor share one, and none is taken."""
    letters = positions(20)
    assert len(set(letters)) == 20
    assert not set("kb") & set(letters)
