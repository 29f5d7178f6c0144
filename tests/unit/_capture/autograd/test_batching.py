"""Which backward passes may go through a piece of a graph together."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autogram._capture.autograd.cotangents import is_batchable
from autogram._capture.autograd.graph import nodes_behind
from tests.unit.checks import irregular
from tests.unit.engines import batch

Function = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda h: h.roll(1, 0), True, id="roll along a dimension"),
        pytest.param(lambda h: h.roll((1, 2), (0, 1)), True, id="roll along two"),
        pytest.param(lambda h: h.sum().roll(1), False, id="roll of a number"),
        pytest.param(lambda h: h[h > 0], True, id="index by a mask"),
        pytest.param(lambda h: torch.cdist(h, irregular(5, 3), p=1.0), False, id="cdist"),
    ],
)
def test_what_is_right_is_batched(function: Function, expected: bool) -> None:
    output = function(batch(4, 3).requires_grad_() * 2)
    assert is_batchable(nodes_behind(output)) == expected
