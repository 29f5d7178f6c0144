"""What every rule is tested with: kinds of losses, alone and beside other uses."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SCALAR,
    SECOND,
    SEVERAL,
    Comparison,
    ModelFactory,
    Objectives,
    assert_gramian_is_exact,
    assert_same_numbers,
)
from tests.unit.networks import AmongOthers

Wrap = Callable[[nn.Module], nn.Module]


def alone(module: nn.Module) -> nn.Module:
    """The module itself."""
    return module


SETTINGS = [
    pytest.param(alone, PER_SAMPLE, id="alone (B,)"),
    pytest.param(alone, COUPLED, id="alone coupled"),
    pytest.param(AmongOthers, SEVERAL, id="among others (B, K)"),
    pytest.param(AmongOthers, SECOND, id="among others (K, B)"),
    pytest.param(AmongOthers, SCALAR, id="among others ()"),
]


def assert_rule_is_exact(
    make_model: ModelFactory,
    x: Tensor,
    wrap: Wrap,
    objectives: Objectives,
    assert_same: Comparison = assert_same_numbers,
) -> None:
    """Assert that the Gramian of a model that makes one call is right."""
    assert_gramian_is_exact(
        lambda: wrap(make_model()), x, objectives=objectives, assert_same=assert_same
    )
