"""Parameters that are replaced while losses of earlier forward passes live: J lists its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import per_sample


class Extra(nn.Module):
    """A parameter that the losses do not reach, between two that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.extra = nn.Parameter(torch.randn(7))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())

    def losses(self) -> Tensor:
        return per_sample(self(torch.randn(5, 3)))


def replace_extra(model: Extra) -> None:
    model.extra = nn.Parameter(torch.randn(2, 6))


def replace_layer(model: Extra) -> None:
    model.last = nn.Linear(4, 3)


def replace_all(model: Extra) -> None:
    model.__init__()


CHANGES = [replace_extra, replace_layer, replace_all]


def assert_lists(engine: Engine, losses: Tensor, parameters: dict[str, Tensor]) -> None:
    """J has the columns of these parameters, in this order."""
    jacobian = engine.jacobian(losses)
    assert jacobian.names == list(parameters)
    if losses.numel():
        reference = reference_jacobian(losses, list(parameters.values()))
        assert_close_to_reference(jacobian.dense(), reference)
    sums = jacobian.vjp(torch.ones(losses.numel()))
    assert {n: x.shape for n, x in sums.items()} == {n: p.shape for n, p in parameters.items()}


@pytest.mark.parametrize("change", CHANGES)
def test_each_jacobian_lists_the_parameters_of_its_forward_pass(
    change: Callable[[Extra], None],
) -> None:
    model = Extra()
    engine = Engine(model, batch_dim=0)
    old, before = model.losses(), dict(model.named_parameters())
    assert_lists(engine, old, before)
    change(model)
    new, after = model.losses(), dict(model.named_parameters())
    for _ in range(2):
        assert_lists(engine, new, after)
        assert_lists(engine, old, before)
        newer = model.losses()
        assert_lists(engine, newer, after)


@pytest.mark.parametrize("change", CHANGES)
def test_losses_without_elements(change: Callable[[Extra], None]) -> None:
    model = Extra()
    engine = Engine(model, batch_dim=0)
    old, before = model.losses(), dict(model.named_parameters())
    change(model)
    assert_lists(engine, old[:0], before)
    assert_lists(engine, model.losses()[:0], dict(model.named_parameters()))


def test_losses_that_no_forward_pass_leads_to() -> None:
    """A penalty lists the parameters that it reaches, and those of now."""
    model = Extra()
    engine = Engine(model, batch_dim=None)
    old = model.losses()
    replace_extra(model)
    penalty = model.first.weight.square().sum(1)
    assert_lists(engine, penalty, dict(model.named_parameters()))
    del old


def test_the_report_is_of_the_parameters_of_the_forward_pass() -> None:
    model = Extra()
    engine = Engine(model, batch_dim=0)
    old = model.losses()
    model.extra = nn.Parameter(torch.randn(7), requires_grad=False)
    engine.compute_gramian(model.losses())
    assert "`extra` does not require a gradient" in str(engine.report())
    del old


def test_a_call_with_other_tensors() -> None:
    """What `functional_call` puts in the place of parameters is listed, of that call."""
    model = Extra()
    engine = Engine(model, batch_dim=0)
    old, before = model.losses(), dict(model.named_parameters())
    others = {n: torch.randn_like(p).requires_grad_() for n, p in before.items()}
    others["extra"] = torch.randn(3, requires_grad=True)
    for _ in range(2):
        output = torch.func.functional_call(model, others, (torch.randn(5, 3),))
        assert_lists(engine, per_sample(output), others)
        assert_lists(engine, old, before)
