"""What is to be done with a call, by what it reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autogram import UnsupportedError
from autogram._capture.forward.calls import kind_of
from autogram._capture.forward.decision import NoUse, RunBody, UseRows, UseRule, decide
from autogram._capture.tracked import BATCHED, Status, track_parameter

X = torch.randn(4, 3)
CONSTANT = torch.randn(3)
W, B = (torch.randn(shape, requires_grad=True) for shape in ((3, 3), (3,)))
STATUSES: dict[int, Status] = {id(X): BATCHED, id(W): track_parameter(W), id(B): track_parameter(B)}


def decision(function: Callable[..., Any], *args: Any, is_bare: bool = False) -> Any:
    """The decision about a call that reads the tensors above."""
    reads = [(x, STATUSES.get(id(x))) for x in args if isinstance(x, Tensor)]
    return decide(kind_of(function), args, {}, reads, is_bare=is_bare)


def test_calls_that_read_no_tracked_tensor_are_run() -> None:
    assert decision(torch.relu, X) == NoUse(is_batched=True)
    assert decision(torch.add, X, CONSTANT) == NoUse(is_batched=True)
    assert decision(torch.relu, CONSTANT) == NoUse(is_batched=False)


def test_calls_that_read_tracked_tensors_and_constants_derive() -> None:
    assert decision(torch.mul, W, CONSTANT) == NoUse(is_batched=False, origins=[STATUSES[id(W)]])


def test_nothing_is_derived_or_used_without_gradients() -> None:
    with torch.no_grad():
        assert decision(torch.mul, W, CONSTANT) == NoUse(is_batched=False)
        assert decision(F.linear, X, W) == NoUse(is_batched=True)


def test_a_use_with_a_rule() -> None:
    """The answer has a recipe for each tracked tensor, and what is to be saved for all of them."""
    found = decision(F.linear, X, W, B)
    assert isinstance(found, UseRule)
    (answer,) = found.answers.values()
    assert answer.reads == [STATUSES[id(W)], STATUSES[id(B)]]
    assert [id(x) for x in answer.saved] == [id(X)]
    assert [answer.saved[recipe.saved] for recipe in answer.recipes] == [[X], []]


def test_a_use_without_a_rule() -> None:
    """Also one that may run again unseen."""
    for found in (decision(torch.dist, X, W), decision(F.linear, X, W, is_bare=True)):
        assert isinstance(found, UseRows)
        assert [status for _, status in found.reads] == [STATUSES[id(W)]]


def test_a_python_function_of_torch() -> None:
    found = decision(F.multi_head_attention_forward, X, W)
    assert isinstance(found, RunBody)


def test_a_nested_tensor_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged)
    reads: list[tuple[Tensor, Status]] = [(nested, BATCHED), (W, STATUSES[id(W)])]
    with pytest.raises(UnsupportedError, match="`matmul` was called with a nested tensor"):
        decide(kind_of(torch.matmul), (nested, W), {}, reads, is_bare=False)
