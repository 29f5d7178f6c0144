"""Rule of the bilinear form."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.checks import ModelFactory, Objectives
from tests.unit.networks import call
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact


class OfOneInput(nn.Module):
    """A bilinear layer of an input and a function of it."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(4, 3, 5, bias=bias)

    def forward(self, x):
        return self.bilinear(x, x[..., :3].sin())


CASES = [
    pytest.param(OfOneInput, (3, 4), id="bilinear"),
    pytest.param(OfOneInput, (3, 2, 4), id="positions"),
    pytest.param(lambda: OfOneInput(bias=False), (3, 2, 6, 4), id="no bias"),
    pytest.param(call(lambda x, w: F.bilinear(x, x, w), (4, 4, 4)), (4, 4), id="all sizes equal"),
    pytest.param(
        call(lambda x, p, w: F.bilinear(x, p, w), (3, 2), (5, 4, 2)),
        (3, 4),
        id="an input is a parameter",
    ),
]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_gramian_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    assert_rule_is_exact(make_model, torch.randn(shape), wrap, objectives)
