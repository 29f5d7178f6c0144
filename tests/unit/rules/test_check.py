"""The check of rules: it passes right ones, and says what is wrong with the others."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autogram import RuleCheckError
from autogram.rules import Rule, find_rule, product, register_rule, unregister_rule
from autogram.testing import check_rule
from tests.unit.rules.examples import p, x

Answer = Callable[[Tensor, Tensor], Any]


@pytest.fixture
def rule_of_hypot() -> Iterator[Callable[[Rule], None]]:
    """Registers a rule of a torch function that has none, for one test."""
    yield register_rule(torch.hypot)
    if find_rule(torch.hypot) is not None:
        unregister_rule(torch.hypot)


def derivative(input: Tensor, other: Tensor) -> Tensor:
    """That of ``torch.hypot`` by its second argument."""
    return other.detach() / torch.hypot(input, other.detach())


def right(input: Tensor, other: Tensor) -> Any:
    return [product(other, "to,to->o", derivative(input, other))]


WRONG: dict[str, tuple[Answer, str]] = {
    "one percent": (
        lambda i, o: [product(o, "to,to->o", derivative(i, o), scale=1.01)],
        r"wrong for `args\[1\]` of shape \(3,\): with 1 objective of the whole batch, .* off by 1",
    ),
    "sign": (
        lambda i, o: [product(o, "to,to->o", derivative(i, o), scale=-1)],
        "off by 2.0e",
    ),
    "order of the elements": (
        lambda i, o: [product(o, "to,to->o", derivative(i, o).flip(1))],
        "off by",
    ),
    "samples where none can be": (
        # The sum over the positions is taken too early: no sample has a part of it.
        lambda i, o: [
            product(
                *(o, "so,to->o", derivative(i, o)),
                prepare=lambda g, d: ((g * d).sum(1, keepdim=True), torch.ones_like(d[:1])),
            )
        ],
        "samples in dimension 0",
    ),
    "several objectives": (
        lambda i, o: [
            product(
                *(o, "to,to->o", derivative(i, o)),
                prepare=lambda g, d: (g[:1].expand_as(g), d),
            )
        ],
        "with 3 objectives",
    ),
    "no answer": (lambda _, __: None, r"returned `None`, or has no recipe for `args\[1\]`"),
    "no recipes": (lambda _, __: [], "so the fallback computes the call"),
    "recipe for another tensor": (
        lambda i, o: [product(o.detach(), "to,to->o", derivative(i, o))],
        "has no recipe",
    ),
    "too many dimensions": (
        lambda i, o: [product(o, "to,to->ot", derivative(i, o))],
        "fails to give a block with 1 objective of the whole batch",
    ),
}


def test_right_rule(rule_of_hypot: Callable[[Rule], None]) -> None:
    rule_of_hypot(right)
    check_rule(torch.hypot, x(4, 3), p(3))
    check_rule(lambda i, o: torch.hypot(input=i, other=o), x(4, 3), o=p(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_rule_in_less_precision(
    dtype: torch.dtype, rule_of_hypot: Callable[[Rule], None]
) -> None:
    rule_of_hypot(right)
    check_rule(torch.hypot, x(4, 3).to(dtype), p(3).detach().to(dtype).requires_grad_())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule(name: str, rule_of_hypot: Callable[[Rule], None]) -> None:
    answer, message = WRONG[name]

    def wrong(input: Tensor, other: Tensor) -> Any:
        return answer(input, other)

    rule_of_hypot(wrong)
    with pytest.raises(RuleCheckError, match=message):
        check_rule(torch.hypot, x(4, 3), p(3))


def test_an_error_of_a_rule_is_no_wrong_block(rule_of_hypot: Callable[[Rule], None]) -> None:
    """One that the rule itself raises shows where it was raised."""

    def failing(input: Tensor, other: Tensor) -> Any:
        raise KeyError(f"no rule for {input.dim()} and {other.dim()} dimensions")

    rule_of_hypot(failing)
    with pytest.raises(KeyError, match="no rule for 2 and 1"):
        check_rule(torch.hypot, x(4, 3), p(3))


def test_blind_spots_of_the_gramian(rule_of_hypot: Callable[[Rule], None]) -> None:
    """Rows that are permuted and negative have the right inner products."""

    def permuted(input: Tensor, other: Tensor) -> Any:
        return [product(other, "to,to->o", -derivative(input, other), prepare=_flipped)]

    rule_of_hypot(permuted)
    with pytest.raises(RuleCheckError, match="off by"):
        check_rule(torch.hypot, x(4, 3), p(3))


def _flipped(cotangent: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return cotangent.flip(2), factor.flip(1)


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "no rule": (lambda: check_rule(torch.kron, x(4, 3), p(5, 3)), "`kron` has no rule"),
    "rule of another overload": (
        lambda: check_rule(torch.Tensor.__getitem__, p(5, 3), slice(0, 2)),
        "not a single call",
    ),
    "no parameter": (lambda: check_rule(F.linear, x(4, 3), x(5, 3)), "No argument requires"),
    "no input": (lambda: check_rule(F.linear, p(4, 3), p(5, 3)), "0 were recorded"),
    "two calls": (
        lambda: check_rule(lambda a, b: F.linear(F.linear(a, b), b), x(4, 3), p(3, 3)),
        "2 were recorded",
    ),
    "something behind the call": (
        lambda: check_rule(lambda a, b: F.linear(a, b).sin(), x(4, 3), p(3, 3)),
        "not a single call",
    ),
    "no input, two outputs": (
        lambda: check_rule(torch.var_mean, p(4, 3)),
        "not a single call",
    ),
    "gradient of zero": (
        lambda: check_rule(torch.where, torch.ones(4, 3, dtype=torch.bool), x(4, 3), p(3)),
        r"gradient of `args\[2\]` is zero",
    ),
    "one of two parameters is unused": (
        lambda: check_rule(lambda a, b, c: F.linear(a, b), x(4, 3), p(3, 3), c=p(3)),  # noqa: ARG005
        "has no recipe for `c`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_cannot_be_checked(name: str) -> None:
    check, message = REFUSED[name]
    with pytest.raises(RuleCheckError, match=message):
        check()


def test_arguments_are_left_alone() -> None:
    """Also by a call that changes its first argument in place, and by its random numbers."""
    input, parameter = x(4, 3), p(3)
    before, state = input.clone(), torch.random.get_rng_state()
    check_rule(torch.Tensor.add_, input, parameter)
    assert torch.equal(input, before)
    assert parameter.grad is None
    assert torch.equal(torch.random.get_rng_state(), state)


def test_other_order_in_memory() -> None:
    """Parameters whose elements are not in the order of their dimensions."""
    weight = torch.randn(3, 5).mT.requires_grad_()
    check_rule(F.linear, x(4, 3), weight)
    kernel = torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    check_rule(F.conv2d, x(4, 3, 3, 4), kernel)
    check_rule(F.conv_transpose2d, x(4, 5, 3, 4), kernel)


def test_parameter_that_is_passed_twice() -> None:
    weight = p(3, 3)
    check_rule(torch.nn.functional.bilinear, x(4, 3), x(4, 3), p(2, 3, 3))
    check_rule(torch.einsum, "bi,ij,jo->bo", x(4, 3), weight, weight)
