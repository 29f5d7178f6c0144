"""The assertions of the tests can fail."""

import copy

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from tests.arranged import steps
from tests.unit.checks import (
    EVERY_KIND,
    TOLERANCES,
    Objectives,
    assert_close_to_reference,
    assert_gramian_is_exact,
    assert_same_gradients,
    features,
)
from tests.unit.networks import AmongOthers, call


def test_error_above_the_tolerance() -> None:
    expected = torch.eye(3)
    error = torch.zeros(3, 3)
    error[0, 2] = 2 * TOLERANCES[expected.dtype]
    with pytest.raises(AssertionError, match="relative error"):
        assert_close_to_reference(expected + error, expected)
    assert_close_to_reference(expected + error / 4, expected)


def test_not_a_number() -> None:
    with pytest.raises(AssertionError, match="relative error nan"):
        assert_close_to_reference(torch.full((2, 2), torch.nan), torch.eye(2))


def test_expectation_of_zeros() -> None:
    with pytest.raises(AssertionError, match="zeros shows nothing"):
        assert_close_to_reference(torch.zeros(2, 2), torch.zeros(2, 2))


def test_other_shape() -> None:
    with pytest.raises(AssertionError):
        assert_close_to_reference(torch.ones(1, 1), torch.ones(2, 2))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: p.grad.view(-1)[0].mul_(1 + 1e-6), id="other value"),
        pytest.param(lambda p: setattr(p, "grad", None), id="no gradient"),
    ],
)
def test_other_gradients(change) -> None:
    model = nn.Linear(3, 2)
    model(torch.randn(4, 3)).sum().backward()
    twin = copy.deepcopy(model)
    for parameter, other in zip(twin.parameters(), model.parameters(), strict=True):
        other.grad = parameter.grad = torch.ones_like(parameter)
        other.grad = other.grad.clone()
    assert_same_gradients(model, twin)
    change(twin.weight)
    with pytest.raises(AssertionError, match="weight"):
        assert_same_gradients(model, twin)


def test_wrong_gramian(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Engine.compute_gramian
    monkeypatch.setattr(Engine, "compute_gramian", lambda e, x: right(e, x) * (1 + 1e-6))
    with pytest.raises(AssertionError, match="relative error"):
        assert_gramian_is_exact(lambda: nn.Linear(3, 2), torch.randn(4, 3))


def test_wrong_gradients() -> None:
    def make_model() -> nn.Module:
        model = nn.Linear(3, 2)
        model.weight.register_hook(lambda g: g * (1 + 1e-6))  # a copy of the model has no hooks
        return model

    with pytest.raises(AssertionError, match="weight"):
        assert_gramian_is_exact(make_model, torch.randn(4, 3))


def test_gradients_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Engine.compute_gramian

    def and_backward(engine: Engine, losses: Tensor) -> Tensor:
        losses.sum().backward(retain_graph=True)
        return right(engine, losses)

    monkeypatch.setattr(Engine, "compute_gramian", and_backward)
    with pytest.raises(AssertionError, match="left behind"):
        assert_gramian_is_exact(lambda: nn.Linear(3, 2), torch.randn(4, 3))


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
def test_objectives_depend_on_every_element(objectives: Objectives) -> None:
    output = torch.randn(3, 2, 2, requires_grad=True)
    gradient = torch.autograd.grad(objectives.of(output).sum(), output)[0]
    assert gradient.abs().min() > 0


def test_features_are_different() -> None:
    found = features(torch.randn(6, 4), 3)  # (6, 3)
    assert torch.linalg.matrix_rank(found) == 3


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param(lambda x, p: x + p, lambda x, p: x - p, id="sign"),
        pytest.param(lambda x, p: x * p, lambda x, p: x * p.flip(0), id="order"),
    ],
)
def test_among_others_tells_apart_what_a_single_use_does_not(right, wrong) -> None:
    """The Gramian of one use of a parameter does not know its sign and its order."""
    x = torch.randn(3, 4)

    def gramian(function, *, alone: bool) -> Tensor:
        torch.manual_seed(0)
        model = call(function, (4,))()
        if not alone:
            model = AmongOthers(model)
        y = model(x)
        weights = torch.ones(y.shape[1])
        rows = [
            torch.autograd.grad(loss, model.parameters(), retain_graph=True) for loss in y @ weights
        ]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        return jacobian @ jacobian.T

    assert torch.allclose(gramian(right, alone=True), gramian(wrong, alone=True))
    assert not torch.allclose(gramian(right, alone=False), gramian(wrong, alone=False))


def test_last_bits_follow_from_the_arrangement_of_operands() -> None:
    """Not from values and memory, nor from an expansion that the operator makes itself."""
    x, y, power = torch.rand(5, 4), torch.rand(5, 4), torch.rand(4)
    moved = steps("pow.Tensor_Tensor", (x, power), x)
    assert set(moved.flatten().tolist()) == {-1, 0, 1}
    assert torch.equal(moved, steps("pow.Tensor_Tensor", (y, power.expand(5, 4)), y))
    assert not torch.equal(moved, steps("pow.Tensor_Tensor", (x, power.repeat(5, 1)), x))
    assert not torch.equal(moved, steps("pow.Tensor_Tensor", (x.mT.contiguous().mT, power), x))
    assert not steps("mm", (x, x.mT), torch.arange(20).view(5, 4) / 4).any()
