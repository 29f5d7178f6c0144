"""The registry, and that the tables of cases leave out no rule."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from autogram import Engine, RuleError
from autogram.rules import (
    Recipe,
    Rule,
    find_rule,
    product,
    register_rule,
    registered_functions,
)
from autogram.testing import check_rule
from tests.unit.rules.examples import examples_of

FAMILIES = [
    *("bilinear", "convolution", "elementwise", "embedding", "embedding_bag", "joining", "linear"),
    "normalization",
]


class Spy:
    """Finds rules for a recorder, and notes which functions they gave all blocks of."""

    def __init__(self) -> None:
        self.known: set[Callable[..., Any]] = set()

    def find_rule(self, function: Callable[..., Any]) -> Rule | None:
        rule = find_rule(function)
        if rule is None:
            return None

        @wraps(rule)
        def noted(*args: Any, **kwargs: Any) -> Sequence[Recipe] | None:
            recipes = rule(*args, **kwargs)
            ids = {id(recipe.operand) for recipe in recipes or []}
            read = [x for x in _flat((*args, *kwargs.values())) if isinstance(x, nn.Parameter)]
            if read and all(id(parameter) in ids for parameter in read):
                self.known.add(function)
            return recipes

        return noted


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """A spy in the place where recorders look for rules."""
    spy = Spy()
    monkeypatch.setattr("autogram._capture.recorder.find_rule", spy.find_rule)
    return spy


def run_cases(family: str) -> None:
    """Makes the forward pass of every case in the file of one family."""
    module = importlib.import_module(f"tests.unit.rules.test_{family}")
    cases = [(case, torch.get_default_dtype()) for case in module.CASES]
    cases += [(case, torch.float32) for case in getattr(module, "FLOAT32_CASES", [])]
    for case, dtype in cases:
        torch.set_default_dtype(dtype)
        make_model, shape = case.values
        model = make_model()
        engine = Engine(model)
        model(
            torch.randint(0, module.TOKENS, shape) if "embedding" in family else torch.randn(shape)
        )
        del engine


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_every_rule_has_a_case(spy: Spy) -> None:
    for family in FAMILIES:
        run_cases(family)
    assert [f for f in registered_functions() if f not in spy.known] == []


def test_spy_misses_functions_without_a_case(spy: Spy) -> None:
    """The test above can fail: the cases of one family are not enough."""
    run_cases("bilinear")
    assert torch.bilinear in spy.known
    assert torch.conv2d not in spy.known


@pytest.mark.parametrize("function", registered_functions(), ids=resolve_name)
def test_every_rule_agrees_with_autograd(function: Callable[..., Any]) -> None:
    examples = examples_of(function)
    assert examples, "a rule without an example in `examples.py`"
    for args, kwargs in examples:
        check_rule(function, *args, **kwargs)


def test_every_file_of_rules_has_cases() -> None:
    files = {find_rule(f).__module__.rpartition(".")[2] for f in registered_functions()}
    assert files <= set(FAMILIES)


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
    assert find_rule(torch.cdist) is None
