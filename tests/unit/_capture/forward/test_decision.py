"""What is to be done with a call, by what it reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autogram import UnsupportedError
from autogram._capture.forward.calls import kind_of
from autogram._capture.forward.decision import (
    NO_BATCH,
    Batch,
    NoUse,
    RunBody,
    UseExpanded,
    UseRows,
    UseRule,
    decide,
)
from autogram._capture.tracked import BATCHED, Status, track_parameter

X = torch.randn(4, 3)
CONSTANT = torch.randn(3)
W, B = (torch.randn(shape, requires_grad=True) for shape in ((3, 3), (3,)))
STATUSES: dict[int, Status] = {id(X): BATCHED, id(W): track_parameter(W), id(B): track_parameter(B)}


def decision(
    function: Callable[..., Any], *args: Any, is_bare: bool = False, batch: Batch = NO_BATCH
) -> Any:
    """The decision about a call that reads the tensors above."""
    reads = [(x, STATUSES.get(id(x))) for x in args if isinstance(x, Tensor)]
    return decide(kind_of(function), args, {}, reads, is_bare=is_bare, batch=batch)


def test_calls_that_read_no_tracked_tensor_are_run() -> None:
    assert decision(torch.relu, X) == NoUse(is_batched=True)
    assert decision(torch.add, X, CONSTANT) == NoUse(is_batched=True)
    assert decision(torch.relu, CONSTANT) == NoUse(is_batched=False)


def test_calls_that_read_tracked_tensors_and_constants_derive() -> None:
    assert decision(torch.mul, W, CONSTANT) == NoUse(is_batched=False, origins=[STATUSES[id(W)]])


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (Tensor.expand, (W, 7, -1, -1)),
        (Tensor.expand, (W, (7, 3, 3))),
        (Tensor.expand, (W, 2, 7, 3, 3)),
        (Tensor.expand_as, (W, torch.zeros(7, 3, 3))),
        (torch.broadcast_to, (W, (7, 3, 3))),
        (Tensor.repeat, (W, 7, 1, 1)),
        (torch.tile, (W, (7, 1, 1))),
        (F.embedding, (torch.arange(3).expand(7, 3), W)),
        (F.embedding, (torch.zeros(7, 3, dtype=torch.int64), W)),
        (torch.add, (W, CONSTANT.expand(7, 3, 3))),
        (torch.add, (W, torch.zeros(7, 3, 3))),
        (F.linear, (torch.zeros(7, 3), W)),
        (Tensor.__setitem__, (torch.zeros(7, 4, 3, 3), (slice(None), 0), W)),
    ],
)
def test_tensors_that_are_expanded_over_the_samples_are_used(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    for batch, expected in (
        (Batch(7), True),
        (Batch(5), False),
        (Batch(7, {B}), True),
        (Batch(7, {W}), False),
    ):
        found = decision(function, *args, batch=batch)
        if expected:
            use = found.expansions[0].use if isinstance(found, UseExpanded) else found
            assert isinstance(use, UseRule)
            assert use.is_guess
            assert [operands for operands, _ in use.answers[0]] == [(STATUSES[id(W)],)]
        else:
            assert found == NoUse(is_batched=False, origins=[STATUSES[id(W)]])


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (Tensor.expand, (W, 1, 1, 7, 3, 3)),  # not where samples are in inputs
        (Tensor.expand, (W, 3, 3)),
        (Tensor.expand, (W,)),
        (Tensor.expand, (W, 3)),
        (Tensor.repeat, (W, 3, 1)),
        (Tensor.repeat, (W, 3)),
        (torch.tile, (W, 3)),
        (Tensor.mul, (W, CONSTANT)),
        (F.embedding, (torch.zeros(7, 7, dtype=torch.int64), W)),  # pairs of positions
        (F.embedding, (torch.zeros(3, 3, dtype=torch.int64), W)),
        (F.embedding, (torch.zeros(7, dtype=torch.int64), W)),
        (Tensor.add, (W, torch.zeros(7, 7, 3))),
        (Tensor.__setitem__, (torch.zeros(7, 3), slice(None), W)),
        (torch.special.entr, (W,)),
    ],
)
def test_other_tensors_are_derived(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Of a size that the number of samples happens to be; or in calls that raise errors."""
    for samples in (3, 7):
        found = decision(function, *args, batch=Batch(samples))
        assert found == NoUse(is_batched=False, origins=[STATUSES[id(W)]])


def test_nothing_is_derived_or_used_without_gradients() -> None:
    with torch.no_grad():
        assert decision(torch.mul, W, CONSTANT) == NoUse(is_batched=False)
        assert decision(F.linear, X, W) == NoUse(is_batched=True)


def test_a_use_with_a_rule() -> None:
    """There is a recipe for each tracked tensor, with what is to be saved for it."""
    found = decision(F.linear, X, W, B)
    assert isinstance(found, UseRule)
    (answer,) = found.answers.values()
    assert [operands for operands, _ in answer] == [(STATUSES[id(W)],), (STATUSES[id(B)],)]
    assert [[id(x) for x in recipe.saved] for _, recipe in answer] == [[id(X)], []]


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
        decide(kind_of(torch.matmul), (nested, W), {}, reads, is_bare=False, batch=NO_BATCH)
