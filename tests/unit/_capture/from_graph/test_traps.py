"""Traps of a capture that reads the graph, each of which both captures must pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from autogram import Engine, UnsupportedError
from autogram._capture.from_graph import switch
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import batch
from tests.unit.networks import Sine


@pytest.fixture(params=[False, True], ids=["recorded", "read from the graph"], autouse=True)
def capture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make engines with each of the two captures."""
    monkeypatch.setattr(switch, "is_on", request.param)
    return bool(request.param)


def assert_steps_are_exact(
    losses_of: Callable[[], Tensor], *modules: nn.Module, engine: Engine | None = None
) -> None:
    """Assert that Gramian, fused gradients and rows are those of plain autograd, step by step."""
    engine = engine or Engine(*modules)
    parameters = [p for module in modules for p in trainable(module)]
    for _ in range(3):
        jacobian = reference_jacobian(losses_of(), parameters)
        assert_close_to_reference(engine.compute_gramian(losses_of()), jacobian @ jacobian.T)
        weights = torch.linspace(0.5, 2.0, len(jacobian))
        engine.backward(losses_of(), lambda _, w=weights: w)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([x.flatten() for x in gradients])
        assert_close_to_reference(flat, weights @ jacobian)
        for parameter in parameters:
            parameter.grad = None


class Tied(nn.Module):
    """A weight that a lookup, a product, and a Function in Python read, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(batch(5, 4))
        self.bias = nn.Parameter(batch(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table[torch.tensor([0, 3, 3])]
        hidden = (rows * x + self.bias).tanh()
        return Sine.apply(hidden, self.bias) @ self.table.T + self.bias.sum()


def test_hooks_on_tensors_change_what_comes_before_them() -> None:
    """Of a node that is carried out, PyTorch returns the cotangent before such hooks."""
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)

    def losses() -> Tensor:
        hidden = first(x)
        hidden.register_hook(lambda g: 3 * g)
        out = second(hidden.tanh())
        out.register_hook(lambda g: g * torch.tensor([1.0, -2.0]))
        return out.square().sum(1)

    x = batch(4, 3)
    assert_steps_are_exact(losses, first, second)


def test_paths_to_a_tied_leaf_are_not_counted_twice() -> None:
    model, x = Tied(), batch(3, 4)
    assert_steps_are_exact(lambda: model(x).square().sum(1), model)


def test_tensors_that_stand_in_for_parameters() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), batch(4, 3)
    other = {name: batch(*p.shape).requires_grad_() for name, p in model.named_parameters()}
    engine = Engine(model)
    losses = (model(x) * functional_call(model, other, x)).sum(1)
    jacobian = reference_jacobian(losses, [*model.parameters(), *other.values()])
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


def test_a_checkpoint_that_hides_its_parameters_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), batch(4, 3)
    hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
    with pytest.raises(UnsupportedError, match="use_reentrant"):
        Engine(model).compute_gramian(model[1](hidden).square().sum(1))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("is_first", [True, False], ids=["from the inputs on", "after a layer"])
def test_parts_of_checkpoints_run_once_more(layers: int, is_first: bool) -> None:
    runs: list[None] = []
    part = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(layers)])
    part.register_forward_pre_hook(lambda *_: runs.append(None))
    entry, head, x = nn.Linear(4, 4), nn.Linear(4, 2), batch(3, 4)

    def losses() -> Tensor:
        hidden = checkpoint(part, x if is_first else entry(x), use_reentrant=False)
        return head(hidden).square().sum(1)

    engine = Engine(part, head, entry)
    assert_steps_are_exact(losses, part, head, *([] if is_first else [entry]), engine=engine)
    steady = losses()
    runs.clear()
    engine.compute_gramian(steady)
    assert len(runs) == 1


def test_slices_that_are_changed_in_place() -> None:
    model, x = nn.Linear(3, 4), batch(4, 3)
    scale = nn.ParameterList([nn.Parameter(batch(2))])

    def losses() -> Tensor:
        hidden = model(x).clone()
        hidden[:, 1:3].mul_(scale[0])
        hidden[:2] += 1.5
        return hidden.square().sum(1)

    assert_steps_are_exact(losses, model, scale)


def test_penalties_and_gradients_that_are_differentiated_again() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), batch(4, 3)

    def losses() -> Tensor:
        y = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(y).sum(), y, create_graph=True)
        return slope.square().sum(1) + 0.1 * model[0].weight.square().sum()

    assert_steps_are_exact(losses, model)


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
def test_losses_from_before_the_engine() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), batch(4, 3)
    losses = model(x).square().sum(1)
    jacobian = reference_jacobian(losses, model.parameters())
    assert_close_to_reference(Engine(model).compute_gramian(losses), jacobian @ jacobian.T)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.t(),
    "a slice": lambda w: w[1:4, :3],
    "every second row": lambda w: w[::2].repeat(2, 1)[:4],
    "permuted": lambda w: w.view(2, 2, 4).permute(2, 0, 1).reshape(4, 4),
    "normed": lambda w: w / w.norm(dim=1, keepdim=True),
    "split": lambda w: torch.cat(w.split([1, 3])[::-1]),
    "expanded": lambda w: w[0].expand(4, 4) + w,
}


@pytest.mark.parametrize("weight_of", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_are_computed_from_a_parameter(weight_of: Callable[[Tensor], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(batch(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            weight = weight_of(self.weight)
            return (x[:, : len(weight)] @ weight).tanh() @ self.weight[: weight.shape[1]]

    model, x = Model(), batch(3, 4)
    assert_steps_are_exact(lambda: model(x).square().sum(1), model)


def test_hooks_on_what_is_computed_from_a_parameter() -> None:
    """No node tells of such a hook."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(batch(4, 4)), nn.Parameter(batch(4))
            self.is_hooked = False

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight * self.scale
            if self.is_hooked:
                weight.register_hook(lambda g: g * g.new_tensor([1.0, -2.0, 0.5, 3.0]))
            return x @ weight

    model, x = Scaled(), batch(3, 4)
    engine = Engine(model)
    for is_hooked in (False, True, False):
        model.is_hooked = is_hooked
        assert_steps_are_exact(lambda: model(x).square().sum(1), model, engine=engine)


@pytest.mark.parametrize("view", ["t", "slice", "slice of a view"])
def test_hooks_on_views_of_a_parameter(view: str) -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.is_hooked = nn.Parameter(batch(4, 4)), False

        def forward(self, x: Tensor) -> Tensor:
            whole = self.weight
            weight = {"t": whole.t(), "slice": whole[:, 1:3]}.get(view, whole.view(2, 8)[:, 4:])
            if self.is_hooked:
                weight.register_hook(lambda g: -2 * g)
            return x[:, : len(weight)] @ weight

    model, x = Viewed(), batch(3, 4)
    engine = Engine(model)
    for is_hooked in (False, True, False):
        model.is_hooked = is_hooked
        assert_steps_are_exact(lambda: model(x).square().sum(1), model, engine=engine)


@pytest.mark.parametrize("count", [1, 3], ids=["one loss a sample", "several"])
def test_retained_gradients_are_the_users_own(count: int) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, count)), batch(4, 3)
    engine = Engine(model, batch_dim=0)

    def losses_of(hidden: Tensor) -> Tensor:
        return model[1:](hidden).sin().squeeze(1)

    for _ in range(2):
        kept: list[Tensor] = []

        def keep(_: Any, __: Any, output: Tensor, kept: list[Tensor] = kept) -> None:
            output.retain_grad()
            kept.append(output)

        handle = model[0].register_forward_hook(keep)
        losses = losses_of(model[0](x))
        handle.remove()
        engine.compute_gramian(losses)
        (hidden,) = kept
        assert hidden.grad is None
        losses.sum().backward(retain_graph=True)
        found, hidden.grad = hidden.grad, None
        (expected,) = torch.autograd.grad(losses.sum(), hidden)
        torch.testing.assert_close(found, expected)


def test_recurrent_layers() -> None:
    layers = nn.ModuleList([nn.LSTM(3, 4, 2, bidirectional=True), nn.GRU(8, 3), nn.RNN(3, 2)])
    x = batch(5, 4, 3)

    def losses() -> Tensor:
        y = x
        for layer in layers:
            y, _ = layer(y)
        return y.square().sum((0, 2))

    assert_steps_are_exact(losses, layers)
