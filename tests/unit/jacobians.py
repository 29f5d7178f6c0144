"""Assertions on every product with the Jacobian of small models."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from autogram import Engine, Jacobian
from autogram.testing import reference_jacobian
from tests.unit.checks import (
    PER_SAMPLE,
    ModelFactory,
    Objectives,
    assert_close_to_reference,
    in_real,
    irregular,
    trainable,
)


def assert_jacobian_is_exact(
    make_model: ModelFactory,
    *inputs: Any,
    objectives: Objectives = PER_SAMPLE,
    keep: str = "auto",
    memory_limit_bytes: int = 2**29,
) -> None:
    """Assert that all products with the Jacobian are those of plain autograd's, row by row."""
    model = make_model()
    twin = copy.deepcopy(model)
    engine = Engine(model, batch_dim=objectives.batch_dim, memory_limit_bytes=memory_limit_bytes)

    def losses_of(module: nn.Module) -> Tensor:
        torch.manual_seed(1)
        return objectives.of(module(*copy.deepcopy(inputs)))

    jacobian = engine.jacobian(losses_of(model), keep=keep)
    expected = reference_jacobian(losses_of(twin), trainable(twin))
    assert_operator_is(jacobian, expected)
    assert_accumulates(jacobian, model, twin, losses_of(twin))


def assert_operator_is(jacobian: Jacobian, expected: Tensor) -> None:
    """Assert that an operator's products are those of an explicit matrix."""
    m, n = expected.shape
    assert jacobian.shape == (m, n)
    assert_close_to_reference(jacobian.dense(), expected)
    assert_close_to_reference(jacobian.gramian(), expected @ expected.T)
    assert_close_to_reference(jacobian.row_norms(), expected.norm(dim=1))
    assert_close_to_reference(jacobian.cross_gramian(jacobian), expected @ expected.T)
    assert_norms_by_group(jacobian, expected)
    blocks = jacobian.block_gramians()
    assert list(blocks) == jacobian.names
    assert_close_to_reference(sum(blocks.values()), expected @ expected.T)

    weights = irregular(3, m).to(expected)
    weights[0, 1::2] = 0
    assert_close_to_reference(flat(jacobian.vjp(weights[0])), weights[0] @ expected)
    assert_close_to_reference(flat(jacobian.vjp(weights), 3), weights @ expected)

    like = jacobian.vjp(weights[0])
    v = irregular(n).to(expected)
    parts = v.split([in_real(x).numel() for x in like.values()])
    direction = {
        name: torch.view_as_complex(part.view(*x.shape, 2))
        if x.is_complex()
        else part.view(x.shape)
        for (name, x), part in zip(like.items(), parts, strict=True)
    }
    assert_close_to_reference(jacobian.jvp(direction), expected @ v)

    last = [m - 1, 0]
    assert_close_to_reference(flat(jacobian.rows(last), 2), expected[last])
    assert_is_matrix(jacobian, expected)


def assert_norms_by_group(jacobian: Jacobian, expected: Tensor) -> None:
    """Assert that norms by parameter, and by groups of several, are those of parts of the rows."""
    like, m = jacobian.vjp(torch.zeros(len(expected), dtype=expected.dtype)), len(expected)
    parts = expected.split([in_real(x).numel() for x in like.values()], 1)
    by_name = jacobian.row_norms(lambda name: name)
    assert list(by_name) == jacobian.names
    norms = torch.stack([part.norm(dim=1) for part in parts])
    assert_close_to_reference(torch.stack([*by_name.values()]), norms)

    group_of = alternating(jacobian.names)
    squares: dict[str, Tensor] = {}
    for name, part in zip(jacobian.names, parts, strict=True):
        squares[group_of[name]] = squares.get(group_of[name], torch.zeros(m)) + part.square().sum(1)
    by_group = jacobian.row_norms(group_of.__getitem__)
    assert list(by_group) == list(squares)
    norms = torch.stack([*squares.values()]).sqrt()
    assert_close_to_reference(torch.stack([*by_group.values()]), norms)


def alternating(names: list[str]) -> dict[str, str]:
    """The group of each name, of which there are two, or one for one name."""
    return {name: str(i % 2) for i, name in enumerate(names)}


def assert_is_matrix(jacobian: Jacobian, expected: Tensor) -> None:
    """Assert that an operator, written like a matrix, acts like an explicit one."""
    m, n = expected.shape
    assert (len(jacobian), jacobian.T.shape) == (m, (n, m))
    found = torch.cat([jacobian[m - 1].unsqueeze(0), jacobian[:-1]])
    assert_close_to_reference(found, expected.roll(1, 0))
    v, w = irregular(n, 2).to(expected), irregular(m, 2).to(expected)
    assert_close_to_reference(jacobian @ v[:, 0], expected @ v[:, 0])
    assert_close_to_reference(jacobian @ v, expected @ v)
    assert_close_to_reference(jacobian.T @ w[:, 0], expected.T @ w[:, 0])
    assert_close_to_reference(jacobian.T @ w, expected.T @ w)
    assert_close_to_reference(jacobian @ jacobian.T, expected @ expected.T)


def assert_accumulates(
    jacobian: Jacobian, model: nn.Module, twin: nn.Module, expected_losses: Tensor
) -> None:
    """Assert that gradients are those of a backward pass, and `None` where that leaves `None`."""
    weights = irregular(expected_losses.numel()).to(expected_losses).view(expected_losses.shape)
    jacobian.accumulate_grad(weights)
    jacobian.accumulate_grad(weights)
    expected_losses.backward(2 * weights, retain_graph=True)
    assert_gradients_are_close(model, twin)

    group_of = alternating(jacobian.names)
    by_group = {
        name: (2 + i) * weights.sin() for i, name in enumerate(sorted({*group_of.values()}))
    }
    jacobian.accumulate_grad(by_group, group_of.__getitem__)
    named = dict(twin.named_parameters())
    for group, w in by_group.items():
        some = [named[name] for name in jacobian.names if group_of[name] == group]
        expected_losses.backward(w, inputs=some, retain_graph=True)
    assert_gradients_are_close(model, twin)


def assert_gradients_are_close(model: nn.Module, twin: nn.Module) -> None:
    """Assert that `.grad` of all parameters of two models of one structure agree to rounding."""
    found = []
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            pair = parameter.grad, other.grad.to_dense()
            assert _strides(pair[0]) == _strides(pair[1]), name
            assert pair[0].dtype == pair[1].dtype, name
            found.append([in_real(x).flatten() for x in pair])
    assert_close_to_reference(*(torch.cat(some) for some in zip(*found, strict=True)))


def _strides(tensor: Tensor) -> list[int]:
    """Those by which an element is found: of dimensions that have several."""
    return [stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def flat(gradients: dict[str, Tensor], count: int | None = None) -> Tensor:
    """Gradients as one vector, or as a matrix if each is a stack of ``count``."""
    if count is None:
        return torch.cat([in_real(gradient).flatten() for gradient in gradients.values()])
    return torch.cat([in_real(gradient).reshape(count, -1) for gradient in gradients.values()], 1)
