"""The registry, and that every rule in it agrees with plain autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import resolve_name

from autogram import RuleError
from autogram.rules import (
    find_rule,
    product,
    register_rule,
    registered_functions,
)
from autogram.testing import check_rule
from tests.unit.rules.examples import examples_of


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("function", registered_functions(), ids=resolve_name)
def test_every_rule_agrees_with_autograd(function: Callable[..., Any]) -> None:
    examples = examples_of(function)
    assert examples, "a rule without an example in `examples.py`"
    for args, kwargs in examples:
        check_rule(function, *args, **kwargs)


@pytest.mark.parametrize(
    "equation",
    [
        pytest.param("kt->t", id="the index of objectives"),
        pytest.param("bt->t", id="the index of samples"),
        pytest.param("t,ti->oi", id="an index that no factor has"),
    ],
)
def test_equation_that_is_not_valid(equation: str) -> None:
    with pytest.raises(RuleError, match=f"equation `{equation}` of a rule is not valid"):
        product(torch.zeros(2, 2), equation)


def test_second_rule_of_a_function() -> None:
    before = find_rule(torch.bilinear)

    def again(*args: Tensor) -> None:
        del args

    with pytest.raises(RuleError, match="has a rule already"):
        register_rule(torch.bilinear)(again)
    assert find_rule(torch.bilinear) is before


def test_function_without_a_rule() -> None:
    assert find_rule(torch.kron) is None
