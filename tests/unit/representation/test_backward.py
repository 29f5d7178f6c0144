"""Steps with weights from the Gramian with respect to a representation, against plain autograd."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import (
    FreedGraphError,
    InvalidOperandError,
    InvalidOptionError,
    NonFiniteError,
    UnsupportedError,
    representation,
)
from autogram.testing import reference_jacobian
from autogram.weightings import UPGrad
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import batch
from tests.unit.jacobians import assert_gradients_are_close


class Tasks(nn.Module):
    """A trunk, and three heads of which two share a layer. Their losses have different scales."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
        self.both = nn.Linear(5, 5)
        self.heads = nn.ModuleList(nn.Linear(5, n) for n in (1, 2, 3))

    def losses(self, hidden: Tensor) -> list[Tensor]:
        """One loss for each task and sample, ``(B,)`` each."""
        inputs = [hidden, self.both(hidden), self.both(hidden).sin()]
        outputs = [head(x) for head, x in zip(self.heads, inputs, strict=True)]
        return [(10.0**i) * (y.square() + y).sum(1) for i, y in enumerate(outputs)]


FORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "tensor": torch.stack,
    "list": lambda losses: losses,
    "dict": lambda losses: {f"task {i}": loss for i, loss in enumerate(losses)},
}


def as_tensor(losses: Any) -> Tensor:
    if isinstance(losses, Tensor):
        return losses
    return torch.stack(list(losses.values() if isinstance(losses, dict) else losses))


def plain_step(twin: Tasks, losses: Tensor, hidden: Tensor, outside: str) -> Tensor:
    """The same step by autograd, row by row; returns the weights."""
    rows = reference_jacobian(losses, [hidden])
    weights = UPGrad()(rows @ rows.T).view(losses.shape)
    trunk = list(twin.trunk.parameters())
    losses.backward(weights, inputs=trunk, retain_graph=True)
    heads = [p for p in twin.parameters() if all(p is not x for x in trunk)]
    losses.backward(torch.ones_like(losses) if outside == "sum" else weights, inputs=heads)
    return weights


@pytest.mark.parametrize("outside", ["sum", "weighted"])
@pytest.mark.parametrize("form", FORMS)
def test_steps_are_those_of_plain_autograd(form: str, outside: Any) -> None:
    """Over a series with an optimizer."""
    model = Tasks()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, twin)]
    for step in range(5):
        x = batch(6 + step % 2, 4)
        hidden = model.trunk(x)
        losses = FORMS[form]([loss.mean() for loss in model.losses(hidden)])
        weights = representation.backward(losses, hidden, UPGrad(), gradients_outside=outside)
        assert type(weights) is type(losses)
        hidden = twin.trunk(x)
        means = torch.stack([loss.mean() for loss in twin.losses(hidden)])
        assert_close_to_reference(as_tensor(weights), plain_step(twin, means, hidden, outside))
        assert_gradients_are_close(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("outside", ["sum", "weighted"])
@pytest.mark.parametrize("batch_dim", [None, 0])
def test_losses_of_each_sample(batch_dim: int | None, outside: Any) -> None:
    model = Tasks()
    twin = copy.deepcopy(model)
    for size in (5, 3, 5):
        x = batch(size, 4)
        hidden = model.trunk(x)
        losses = torch.stack(model.losses(hidden), 1)  # (B, K)
        weights, gramian = representation.backward(
            losses,
            hidden,
            UPGrad(),
            batch_dim=batch_dim,
            gradients_outside=outside,
            return_gramian=True,
        )
        hidden = twin.trunk(x)
        expected = torch.stack(twin.losses(hidden), 1)
        rows = reference_jacobian(expected, [hidden])
        assert_close_to_reference(gramian, rows @ rows.T)
        assert_close_to_reference(weights, plain_step(twin, expected, hidden, outside))
        assert_gradients_are_close(model, twin)


def test_the_trunk_is_visited_once() -> None:
    """And each head, where its gradient is that of the sum."""
    model, calls = Tasks(), []
    for name, module in (("trunk", model.trunk[0]), *[("head", head) for head in model.heads]):
        module.register_full_backward_hook(lambda *_, name=name: calls.append(name))
    hidden = model.trunk(batch(6, 4).requires_grad_())
    representation.backward([loss.mean() for loss in model.losses(hidden)], hidden, UPGrad())
    assert sorted(calls) == ["head", "head", "head", "trunk"]


def test_a_detached_copy_gets_the_gradient() -> None:
    """A leaf that the heads read in place of the trunk's result, as some libraries have it."""
    model = Tasks()
    hidden = model.trunk(batch(6, 4))
    leaf = hidden.detach().requires_grad_()
    losses = torch.stack([loss.mean() for loss in model.losses(leaf)])
    rows = reference_jacobian(losses, [leaf])
    for count in (1, 2):
        weights = representation.backward(losses, leaf, UPGrad(), retain_graph=True)
        assert leaf.grad is not None
        assert_close_to_reference(leaf.grad.flatten(), count * weights @ rows)
    assert all(p.grad is None for p in model.trunk.parameters())


def test_several_tensors_and_skip_connections() -> None:
    """Of a trunk all of whose results the heads read."""
    trunk, head, x = nn.Linear(3, 4), nn.Linear(8, 2), batch(5, 3)
    for outside in ("sum", "weighted", "sum"):
        low = trunk(x).sin()
        high = (2 * trunk(x)).cos()
        losses = head(torch.cat([low, high], 1)).square().mean(0)
        rows = reference_jacobian(losses, [low, high])
        weights = UPGrad()(rows @ rows.T)
        expected = torch.autograd.grad(losses, trunk.weight, weights, retain_graph=True)[0]
        representation.backward(losses, [low, high], UPGrad(), gradients_outside=outside)
        assert_close_to_reference(trunk.weight.grad, expected)
        trunk.zero_grad()


@pytest.mark.parametrize("outside", ["sum", "weighted"])
def test_hooks_on_the_representation_run_once(outside: Any) -> None:
    """With the weighted gradient, which a hook may change, and which may be retained."""
    model, seen = Tasks(), []
    twin = copy.deepcopy(model)
    x = batch(6, 4)

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return 3 * gradient

    grads = []
    for each in (model, twin):
        hidden = each.trunk(x)
        hidden.retain_grad()
        losses = torch.stack([loss.mean() for loss in each.losses(hidden)])
        if each is twin:
            weights = plain_step(twin, losses, hidden, outside)  # before there is a hook
            twin.zero_grad()
            hidden = twin.trunk(x)
            hidden.retain_grad()
            losses = torch.stack([loss.mean() for loss in twin.losses(hidden)])
        hidden.register_hook(hook)
        if each is model:
            representation.backward(losses, hidden, UPGrad(), gradients_outside=outside)
        else:
            losses.backward(weights)
        grads.append(hidden.grad)
    assert len(seen) == 2
    assert_close_to_reference(seen[0], seen[1])
    assert_close_to_reference(grads[0], grads[1])
    for p, other in zip(model.trunk.parameters(), twin.trunk.parameters(), strict=True):
        assert_close_to_reference(p.grad, other.grad)


def flat(parameters: Iterable[nn.Parameter]) -> Tensor:
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def test_hooks_on_parameters_of_heads_run_once() -> None:
    model, seen = Tasks(), []
    head = model.heads[1].weight
    head.register_hook(seen.append)
    hidden = model.trunk(batch(6, 4))
    losses = [loss.mean() for loss in model.losses(hidden)]
    expected = torch.autograd.grad(losses[1], head, retain_graph=True)[0]
    del seen[:]
    representation.backward(losses, hidden, UPGrad())
    assert len(seen) == 1
    assert_close_to_reference(head.grad, expected)


def test_the_graph() -> None:
    model = Tasks()
    hidden = model.trunk(batch(6, 4))
    losses = [loss.mean() for loss in model.losses(hidden)]
    representation.backward(losses, hidden, UPGrad(), retain_graph=True)
    first = flat(model.parameters())
    representation.backward(losses, hidden, UPGrad())
    assert_close_to_reference(flat(model.parameters()), 2 * first)
    with pytest.raises(FreedGraphError, match="The graph of the losses"):
        representation.backward(losses, hidden, UPGrad())


def test_weights_that_are_refused_change_nothing() -> None:
    model = Tasks()
    hidden = model.trunk(batch(6, 4))
    losses = [loss.mean() for loss in model.losses(hidden)]
    backward = representation.backward
    with pytest.raises(NonFiniteError, match=r"The weights of the objectives 0, 1, 2 are infinite"):
        backward(losses, hidden, lambda g: g.new_full((3,), torch.inf), retain_graph=True)
    bad = [losses[0] * torch.inf, *losses[1:]]
    with pytest.raises(NonFiniteError, match="So is the Gramian, in the rows of the objectives"):
        backward(bad, hidden, lambda g: g.sum(0), retain_graph=True)
    with pytest.raises(InvalidOperandError, match=r"of shape \(2,\) was given"):
        backward(losses, hidden, lambda g: g[0, :2], retain_graph=True)
    with pytest.raises(InvalidOperandError, match="Pass a function that maps the Gramian"):
        backward(losses, hidden, torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="`gradients_outside` is 'none'"):
        backward(losses, hidden, UPGrad(), gradients_outside="none")  # type: ignore[call-overload]
    with pytest.raises(InvalidOptionError, match="`retain_graph` is 'no'"):
        backward(losses, hidden, UPGrad(), retain_graph="no")  # type: ignore[call-overload]
    assert all(p.grad is None for p in model.parameters())


def test_leaves_on_both_ways() -> None:
    """A parameter of the trunk that a head reads, too, would get half of each gradient."""
    trunk, x = nn.Linear(3, 3), batch(5, 3)
    hidden = trunk(x)
    losses = (hidden @ trunk.weight).square().mean(0)
    with pytest.raises(UnsupportedError, match=r"shapes \(3, 3\) through .*and around it"):
        representation.backward(losses, hidden, UPGrad())
    assert trunk.weight.grad is None
    rows = reference_jacobian(losses, [hidden])
    weights = UPGrad()(rows @ rows.T)
    expected = torch.autograd.grad(losses, trunk.weight, weights, retain_graph=True)[0]
    representation.backward(losses, hidden, UPGrad(), gradients_outside="weighted")
    assert_close_to_reference(trunk.weight.grad, expected)


def test_another_result_of_the_same_node() -> None:
    """What goes past the representation is told by the result, and not by the node."""
    source, factor = batch(5, 4).requires_grad_(), batch(4).requires_grad_()
    one, other = (source * factor).split(2, 1)
    losses = torch.stack([one.square().sum(), (one.sin() * other).sum()])
    with pytest.raises(UnsupportedError, match="Pass a list of all tensors"):
        representation.backward(losses, one, UPGrad())
    representation.backward(losses, [one, other], UPGrad())
    assert source.grad is not None


def test_frozen_heads_and_without_losses() -> None:
    model = Tasks()
    model.heads.requires_grad_(False)
    model.both.requires_grad_(False)
    hidden = model.trunk(batch(6, 4))
    representation.backward([loss.mean() for loss in model.losses(hidden)], hidden, UPGrad())
    assert all(p.grad is not None for p in model.trunk.parameters())
    assert all(p.grad is None for p in model.heads.parameters())
    model.zero_grad()
    hidden = model.trunk(batch(0, 4))
    weights = representation.backward(model.losses(hidden)[0], hidden, UPGrad(), batch_dim=0)
    assert weights.shape == (0,)
    assert all(p.grad is None for p in model.parameters())
