"""Nodes that are carried out alone: nothing else happens."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, FreedGraphError
from autogram._capture.autograd.graph import nodes_behind
from autogram._capture.places.places import Places
from autogram._capture.places.probe import Prober
from autogram._capture.recording import Channel


class Doubled(torch.autograd.Function):
    """In Python."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient * 2


def changed(x: Tensor) -> Tensor:
    """With a slice that was changed in place."""
    y = x.clone()
    y[:, 0].mul_(3)
    return y


class Both(torch.autograd.Function):
    """Refuses a cotangent that is not there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + 2 * gradients[1]


@pytest.mark.parametrize("function", [torch.tanh, changed, Doubled.apply])
def test_is_seen_and_nothing_else_runs(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    hidden = x * 1
    behind = Mock(return_value=None)
    hidden.register_hook(behind)
    y = function(hidden)
    found = Prober(Channel()).probe(y.grad_fn, [Places.along((4, 3), 0)])
    assert found is not None
    (places,) = {**found[0].inputs}.values()
    assert torch.equal(places.grid().expand(4, 3), torch.arange(4).view(4, 1).expand(4, 3))
    assert x.grad is None
    behind.assert_not_called()


@pytest.mark.parametrize("function", [torch.tanh, changed, Doubled.apply])
def test_no_other_process_is_waited_for(function: Callable[[Tensor], Tensor]) -> None:
    """Functions in Python are not carried out, which may do so."""
    y = function(torch.randn(4, 3, requires_grad=True))
    channel = Channel()
    channel.before_pass = Mock()
    found = Prober(channel).probe(y.grad_fn, [Places.along((4, 3), 0)])
    assert (found is None) == (function == Doubled.apply)
    channel.before_pass.assert_not_called()


@pytest.mark.parametrize("function", [torch.tanh, changed])
def test_no_hook_runs_at_nodes_of_pytorch(function: Callable[[Tensor], Tensor]) -> None:
    """One of `fully_shard` would wait for other processes."""
    y = function(torch.randn(4, 3, requires_grad=True))
    hook = Mock(return_value=None)
    y.register_hook(hook)
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(hook)
    y.grad_fn.register_hook(hook)
    assert Prober(Channel()).probe(y.grad_fn, [Places.along((4, 3), 0)]) is not None
    hook.assert_not_called()


def test_a_freed_graph() -> None:
    y = torch.randn(4, requires_grad=True).exp()
    y.sum().backward()  # frees what the node has saved
    with pytest.raises(FreedGraphError):
        Prober(Channel()).probe(y.grad_fn, [Places.along((4,), 0)])


def test_a_node_that_refuses() -> None:
    """A Function that asks for all cotangents."""
    x = torch.randn(4, requires_grad=True)
    one, _ = Both.apply(x)
    assert Prober(Channel()).probe(one.grad_fn, [Places.along((4,), 0), None]) is None


def test_results_without_a_cotangent() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    deviations, _ = torch.std_mean(x, 1)
    found = Prober(Channel()).probe(deviations.grad_fn, [None, Places.along((4,), 0)])
    assert found is not None
    samples = found[0].inputs[0].grid().expand(4, 3)
    assert torch.equal(samples, torch.arange(4).view(4, 1).expand(4, 3))


def test_hooks_of_changed_slices_are_left_alone() -> None:
    """Whole models: only passes through the graph call them."""
    model = nn.Linear(3, 3)
    engine = Engine(model, verify="never")
    x = model(torch.randn(4, 3))
    y = x * 1
    y[:, 0] *= x[:, 1].exp()
    assert any("CopySlices" in node.name() for node in nodes_behind(y))
    seen: list[Tensor] = []
    y.register_hook(seen.append)
    engine.compute_gramian(y.square().sum(1))
    assert len(seen) == 1
