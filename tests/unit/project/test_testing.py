"""The reference that everything else is compared with."""

import pytest
import torch
from torch import Tensor, nn

from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import batch, mlp


def test_jacobian_of_a_linear_function() -> None:
    """Rows by hand: losses are A p, so the Jacobian is A."""
    matrix, parameter = batch(4, 3), batch(3).requires_grad_()
    assert torch.equal(reference_jacobian(matrix @ parameter, [parameter]), matrix)


def test_columns_are_in_the_order_of_the_parameters() -> None:
    """One after the other, each row-major."""
    first, second = batch(2, 2).requires_grad_(), batch(3).requires_grad_()
    losses = torch.stack([first.sum() + 2 * second[1], (first * first.detach()).sum()])
    jacobian = reference_jacobian(losses, [second, first])
    ones, zeros = torch.ones(4), torch.zeros(3)
    expected = [torch.cat([torch.tensor([0, 2, 0]), ones]), torch.cat([zeros, first.flatten()])]
    assert torch.equal(jacobian, torch.stack(expected).detach())


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3)])
def test_rows_are_in_the_order_of_the_losses(shape: tuple[int, ...]) -> None:
    """Row-major, whatever their shape."""
    parameter = torch.tensor(2.0, requires_grad=True)
    factors = batch(*shape)
    jacobian = reference_jacobian(factors * parameter, [parameter])
    assert torch.equal(jacobian, factors.reshape(-1, 1))


def test_unused_and_frozen_parameters() -> None:
    """The one has columns of zeros, the other none."""
    model = mlp()
    unused, frozen = batch(2).requires_grad_(), batch(2)
    losses = model(batch(3, 3)).sum(1)
    parameters = list(model.parameters())
    jacobian = reference_jacobian(losses, [unused, frozen, *parameters])
    assert torch.equal(jacobian[:, :2], torch.zeros(3, 2))
    assert torch.equal(jacobian[:, 2:], reference_jacobian(losses, iter(parameters)))


def test_the_graph_is_kept_and_nothing_accumulated() -> None:
    """It may be asked twice, and before a backward pass."""
    model = mlp()
    losses = model(batch(3, 3)).sum(1)
    first = reference_jacobian(losses, model.parameters())
    assert torch.equal(reference_jacobian(losses, model.parameters()), first)
    assert not first.requires_grad
    assert all(p.grad is None for p in model.parameters())
    losses.backward(torch.tensor([1.0, 2.0, 3.0]))
    summed = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_close_to_reference(torch.tensor([1.0, 2.0, 3.0]) @ first, summed)


def test_sparse_gradients() -> None:
    """Those of an embedding that asks for them are made dense."""
    table = nn.Embedding(4, 2, sparse=True)
    ids = torch.tensor([1, 3])
    expected = torch.zeros(2, 4, 2)
    expected[0, 1] = expected[1, 3] = 1
    jacobian = reference_jacobian(table(ids).sum(1), table.parameters())
    assert torch.equal(jacobian, expected.flatten(1))


def test_agrees_with_functional_differentiation() -> None:
    """Another way to the same numbers."""
    model = mlp()
    x = batch(4, 3)

    def losses(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum(1)

    parameters = dict(model.named_parameters())
    other = torch.func.jacrev(losses)({name: p.detach() for name, p in parameters.items()})
    expected = torch.cat([other[name].flatten(1) for name in parameters], 1)
    assert_close_to_reference(reference_jacobian(losses(parameters), parameters.values()), expected)
