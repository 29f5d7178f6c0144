"""Parameters that are replaced while losses of earlier forward passes live: J lists its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, UnsupportedError
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


def rename_layer(model: Extra) -> None:
    model.head = nn.Linear(4, 3)
    del model.last
    model.forward = lambda x: model.head(model.first(x).tanh())


def freeze_as_buffer(model: Extra) -> None:
    weight = model.last.weight.detach()
    del model.last.weight
    model.last.register_buffer("weight", weight)


def tie(model: Extra) -> None:
    model.last = nn.Linear(3, 4)
    model.last.weight = model.first.weight
    model.forward = lambda x: model.last(model.first(x).tanh()[:, :3])


@pytest.mark.parametrize("change", [*CHANGES, rename_layer, freeze_as_buffer, tie])
def test_parameters_that_were_replaced_are_no_columns(change: Callable[[Extra], None]) -> None:
    """Others may hold what was replaced, as an optimizer does, and losses may depend on it."""
    model = Extra()
    engine = Engine(model, batch_dim=0, verify="never")
    old, layer = dict(model.named_parameters()), model.last
    weight = layer.weight
    engine.compute_gramian(model.losses())
    change(model)
    for _ in range(2):
        assert_lists(engine, model.losses(), dict(model.named_parameters()))
        losses = model.losses() + weight.square().sum()
        assert_lists(engine, losses, dict(model.named_parameters()))
    assert len(old) == 5


def test_a_call_with_derived_tensors_behind_a_replacement() -> None:
    """`functional_call` puts new parameters aside, which the recorder knows all the same."""
    model = Extra()
    engine = Engine(model, batch_dim=0, unseen="error")
    model.last = nn.Linear(4, 3)
    for _ in range(2):
        engine.compute_gramian(model.losses())
        parameters = dict(model.named_parameters())
        doubled = {n: 2 * p for n, p in parameters.items()}
        output = torch.func.functional_call(model, doubled, (torch.randn(5, 3),))
        assert_lists(engine, per_sample(output), parameters)


@pytest.mark.parametrize("verify", ["never", "always"])
def test_a_call_with_derived_tensors_right_behind_a_replacement(verify: Any) -> None:
    """The engine has not seen the new parameter, in whose place the call puts another tensor."""
    model = Extra()
    engine = Engine(model, batch_dim=0, verify=verify)

    def doubled() -> Tensor:
        tensors = {n: 2 * p for n, p in model.named_parameters()}
        return per_sample(torch.func.functional_call(model, tensors, (torch.randn(5, 3),)))

    assert_lists(engine, doubled(), dict(model.named_parameters()))
    model.first.weight = nn.Parameter(torch.randn(4, 3))
    with pytest.raises(
        UnsupportedError, match=r"has read `first\.weight`, which the engine did not know"
    ):
        engine.compute_gramian(doubled())
    assert_lists(engine, doubled(), dict(model.named_parameters()))


@pytest.mark.parametrize("verify", ["never", "always"])
def test_parameters_of_another_graph_that_is_alive(verify: Any) -> None:
    """They are no part of J, and get their gradients as all that is not the engine's does."""
    model, other = Extra(), nn.Linear(3, 3)
    engine = Engine(model, batch_dim=0, verify=verify)
    x, weights = torch.randn(5, 3), torch.rand(5)
    model.first, first = nn.Linear(3, 4), model.first
    tensors = {"extra": other.bias, "first.weight": first.weight}
    alive = torch.func.functional_call(model, tensors, (x,))
    for _ in range(2):
        losses = per_sample(model(other(first(x)[:, :3])))
        leaves = [*other.parameters(), first.weight, model.first.weight]
        expected = torch.autograd.grad(losses, leaves, weights, retain_graph=True)
        for leaf in leaves:
            leaf.grad = None
        assert_lists(engine, losses, dict(model.named_parameters()))
        engine.backward(losses, lambda _: weights, gradients_outside="weighted")
        torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))
    assert alive.requires_grad


def test_a_call_with_derived_tensors_behind_one_with_parameters() -> None:
    """The parameters of another model take the place of those that later tensors come from."""
    model, other = Extra(), Extra()
    engine = Engine(model, batch_dim=0, unseen="error", verify="never")
    parameters = dict(model.named_parameters())
    for _ in range(2):
        x = torch.randn(5, 3)
        first = torch.func.functional_call(model, dict(other.named_parameters()), (x,))
        doubled = {n: 2 * p for n, p in parameters.items()} | {"last.bias": other.last.bias}
        both = first.detach() + torch.func.functional_call(model, doubled, (x,))
        reached = {n: p for n, p in parameters.items() if n != "last.bias"}
        assert_lists(engine, per_sample(both), {"last.bias": other.last.bias} | reached)


def test_a_slice_of_a_model_that_nothing_holds() -> None:
    """Its layers are those of the model, and live on."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    engine = Engine(model[:2], batch_dim=0)
    for _ in range(2):
        losses = per_sample(model(torch.randn(5, 3)))
        assert_lists(engine, losses, dict(model[:2].named_parameters()))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_parameters_may_be_swapped(is_replaced: bool) -> None:
    """As `.to` and `load_state_dict` do with some tensors, or where PyTorch is told to."""
    model = Extra()
    engine = Engine(model, batch_dim=0)
    for dtype in (torch.float32, torch.float64, torch.float32):
        if is_replaced:
            replace_all(model)
        model.to(torch.float64)
        assert_lists(engine, model.losses(), dict(model.named_parameters()))
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(dtype)
            model.load_state_dict(model.state_dict())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


def grow(model: Extra) -> None:
    model.middle.append(nn.Linear(4, 4))


def add_scale(model: Extra) -> None:
    model.scale = nn.Parameter(torch.randn(4))


def grow_beside_lazy(model: Extra) -> None:
    model.middle.append(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))


def replace_first(model: Extra) -> None:
    model.first.weight = nn.Parameter(torch.randn(4, 3))


def unfreeze(model: Extra) -> None:
    model.first.requires_grad_(not model.first.weight.requires_grad)


CHANGES_INSIDE = [grow, grow_beside_lazy, add_scale, replace_first, unfreeze]


@pytest.mark.parametrize("change", CHANGES_INSIDE)
@pytest.mark.parametrize("others", ["", "in front", "before", "behind"])
def test_changes_inside_of_the_forward_pass(change: Callable[[Extra], None], others: str) -> None:
    """Parameters that begin to exist there, or to require a gradient, or no longer do.

    There may be parameters of others, in front of the forward pass, or inside of it, before the
    change or behind it.
    """

    class Changing(Extra):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.ModuleList()
            self.scale: Tensor | float = 1.0
            self.is_due = False

        def forward(self, x: Tensor) -> Tensor:
            x = other(x) if others == "before" else x
            if self.is_due:
                change(self)
            x = other(x) if others == "behind" else x
            h = self.first(x).tanh() * self.scale
            for layer in self.middle:
                h = layer(h).tanh()
            return self.last(h)

    model, other = Changing(), nn.Linear(3, 3)
    engine = Engine(model, batch_dim=0, verify="never")
    for is_due in (False, False, True, False, True, True, False):
        model.is_due = is_due
        x = torch.randn(5, 3)
        losses = per_sample(model(other(x) if others == "in front" else x))
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert set(engine.jacobian(losses).names) == set(parameters)
        reference = reference_jacobian(losses, parameters.values())
        assert_close_to_reference(engine.compute_gramian(losses), reference @ reference.T)


@pytest.mark.parametrize("is_trainable", [False, True])
def test_a_change_of_a_tensor_in_the_place_of_a_parameter(is_trainable: bool) -> None:
    """A tensor that `functional_call` puts there, which is no parameter by its class."""

    class Changing(Extra):
        def forward(self, x: Tensor) -> Tensor:
            self.last.weight.requires_grad_(not is_trainable)
            return super().forward(x)

    model = Changing()
    engine = Engine(model, batch_dim=0, verify="never")
    for _ in range(2):
        others = {"last.weight": torch.randn(2, 4, requires_grad=is_trainable)}
        output = torch.func.functional_call(model, others, (torch.randn(5, 3),))
        known = {**dict(model.named_parameters()), **others}
        trainable = [p for p in known.values() if p.requires_grad]
        reference = reference_jacobian(per_sample(output), trainable)
        gramian = engine.compute_gramian(per_sample(output))
        assert_close_to_reference(gramian, reference @ reference.T)
