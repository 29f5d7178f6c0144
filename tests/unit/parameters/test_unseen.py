"""Parameters used where nothing is recorded: the graph of the losses shows them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import (
    Engine,
    FreedGraphError,
    InvalidOptionError,
    UnseenUseError,
    UnseenUseWarning,
    UnsupportedError,
)
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference

BATCH_DIMS = [
    pytest.param("auto", id="auto"),
    pytest.param(0, id="samples"),
    pytest.param(None, id="coupled"),
]


class Model(nn.Module):
    """Two layers and a temperature that the forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.temperature = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())

    def sharpened(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.temperature)


def penalized(model: Model, x: Tensor) -> Tensor:
    return model(x).square().sum(1) + 0.1 * model.first.weight.square().sum()


def penalized_tasks(model: Model, x: Tensor) -> Tensor:
    return model(x).square() + 0.1 * model.first.weight.square().sum()


def read_again(model: Model, x: Tensor) -> Tensor:
    return F.linear(model(x), model.last.weight.T).square().sum(1)


def another_method(model: Model, x: Tensor) -> Tensor:
    return model.sharpened(x).square().sum(1)


def scaled_input(model: Model, x: Tensor) -> Tensor:
    return model(x * model.temperature).square().sum(1)


def gradient_penalty(model: Model, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    losses = model(x).square().sum(1)
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + gradient.square().sum(1)


def scaled_twice(model: Model, x: Tensor) -> Tensor:
    return (model(x * model.temperature) + model(2 * x * model.temperature)).square().sum(1)


def parts_of_an_input(model: Model, x: Tensor) -> Tensor:
    """Views of one call, which PyTorch lets nobody change in place."""
    parts = (x * model.temperature).split([2, 3])
    return torch.cat([model(part) for part in parts]).square().sum(1)


def input_and_view(model: Model, x: Tensor) -> Tensor:
    """The view leads past a tap that is put on its base afterwards."""
    scaled = x * model.temperature
    view = scaled.T
    return (model(scaled) + model(view.T) + 0.1 * model(view.T.clone())).square().sum(1)


def input_behind_view(model: Model, x: Tensor) -> Tensor:
    scaled = x * model.temperature
    view = scaled[:, None]
    return (model(view[:, 0]) + model(view.squeeze(1)) + model(scaled)).square().sum(1)


def expanded_input(model: Model, x: Tensor) -> Tensor:
    """Its elements share their memory."""
    row = (x.mean(1, keepdim=True) * model.temperature).expand(-1, 3)
    return model(row).square().sum(1)


class Shift(torch.autograd.Function):
    """Reads a parameter, and returns a view, which may not be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        del ctx, parameter
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return gradient, gradient.sum()


def viewed_by_a_function(model: Model, x: Tensor) -> Tensor:
    hook = model.last.register_forward_pre_hook(
        lambda _, args: Shift.apply(args[0], model.temperature)
    )
    outputs = model(x)
    hook.remove()
    return outputs.square().sum(1)


def read_without_gradients(model: Model, x: Tensor) -> Tensor:
    """As for statistics, before any other call reads it."""

    def scaled(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        found: Tensor = torch.func.vmap(lambda row: row * model.temperature)(args[0])
        with torch.no_grad():
            mean = found.mean()
        return found - mean

    hook = model.last.register_forward_pre_hook(scaled)
    outputs = model(x)
    hook.remove()
    return outputs.square().sum(1)


def checkpointed_behind_taps(model: Model, x: Tensor) -> Tensor:
    """Products in a tail, whose factors a checkpoint computes again."""

    def part(y: Tensor) -> Tensor:
        return (y @ model.last.weight * model.temperature).tanh() @ model.first.weight

    outputs = checkpoint(part, model(x), use_reentrant=False)
    return outputs.square().sum(1)


def functional_call(model: Model, x: Tensor) -> Tensor:
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, doubled, (x,)).square().sum(1)


LOSSES = [
    penalized,
    penalized_tasks,
    read_again,
    another_method,
    scaled_input,
    gradient_penalty,
    parts_of_an_input,
    input_and_view,
    input_behind_view,
    expanded_input,
    viewed_by_a_function,
    read_without_gradients,
    checkpointed_behind_taps,
    functional_call,
]


@pytest.mark.parametrize("batch_dim", BATCH_DIMS)
@pytest.mark.parametrize("compute_losses", LOSSES)
def test_gramian_is_exact(
    compute_losses: Callable[[Model, Tensor], Tensor], batch_dim: int | None
) -> None:
    model = Model()
    engine = Engine(model, batch_dim=batch_dim)
    for _ in range(3):
        losses = compute_losses(model, torch.randn(5, 3))
        jacobian = reference_jacobian(losses, model.parameters())
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


@pytest.mark.parametrize("shape", [(3, 4), (3, 1)])
def test_an_expanded_parameter_has_independent_elements(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(shape[1], shape[0])
    layer.weight = nn.Parameter(torch.randn(1, 1).expand(shape))
    engine = Engine(layer)
    losses = layer(torch.randn(5, shape[1])).sin().sum(1)
    jacobian = reference_jacobian(losses, layer.parameters())
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


def test_a_table_that_is_read_in_two_dtypes() -> None:
    """Of which the larger one is kept."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4, dtype=torch.float32)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens).double() @ self.table.weight.double().T

    model = Tied()
    engine = Engine(model)
    losses = model(torch.randint(7, (3, 5))).square().sum((1, 2))
    jacobian = reference_jacobian(losses, model.parameters()).double()
    gramian = engine.compute_gramian(losses)
    assert gramian.dtype == torch.float64
    # Autograd rounds its rows to the dtype of the table.
    torch.testing.assert_close(gramian, jacobian @ jacobian.T, rtol=1e-5, atol=1e-5)


def test_sparse_gradients() -> None:
    """Of a table that is read without a batch, so that they go through autograd."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.layer = nn.Embedding(7, 4, sparse=True), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) + self.places(torch.arange(5))).tanh()

    model = Model()
    engine = Engine(model)
    losses = model(torch.randn(2, 5, 3)).square().sum((1, 2))
    jacobian = reference_jacobian(losses, model.parameters())
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


@pytest.mark.parametrize("batch_dim", BATCH_DIMS)
@pytest.mark.parametrize("verify", ["always", "never"])
def test_parameters_used_before_the_engine_was_made(batch_dim: int | None, verify: Any) -> None:
    """In all of the forward pass, or in a part of it."""
    model = Model()
    x = torch.randn(5, 3)
    losses = model(x).square().sum(1)
    hidden = model.first(x)
    engine = Engine(model, batch_dim=batch_dim, verify=verify)
    later = model.last(hidden.tanh()).square().sum(1)
    for found in (losses, later, losses + later, losses + model(x).sin().sum(1)):
        jacobian = reference_jacobian(found, model.parameters())
        assert_close_to_reference(engine.compute_gramian(found), jacobian @ jacobian.T)


@pytest.mark.parametrize("batch_dim", BATCH_DIMS)
def test_a_forward_that_is_called_directly(batch_dim: int | None) -> None:
    """Of a model, whose parts are seen, and of a layer, which is not."""
    model, layer = Model(), nn.Linear(3, 4)
    for module in (model, layer):
        engine = Engine(module, batch_dim=batch_dim)
        losses = module.forward(torch.randn(5, 3)).square().sum(1)
        jacobian = reference_jacobian(losses, module.parameters())
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


def test_penalties_alone() -> None:
    """Of which no forward pass knows."""
    model = Model()
    engine = Engine(model)
    losses = torch.stack([p.square().sum() for p in model.parameters()])
    jacobian = reference_jacobian(losses, model.parameters())
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


UNSEEN: dict[str, tuple[Callable[[Model, Tensor], Tensor], str]] = {
    "penalty": (penalized, r"in the losses, `first\.weight` \(60 elements\)"),
    "another method": (
        another_method,
        r"in the call behind `MulBackward0`, `temperature` \(5 elements\)",
    ),
    "input": (scaled_input, r"in the call behind `MulBackward0`, `temperature` \(5 elements\)"),
    "twice": (scaled_twice, r"in the call behind `MulBackward0`, `temperature` \(10 elements\)"),
}


@pytest.mark.parametrize("batch_dim", BATCH_DIMS)
@pytest.mark.parametrize("name", UNSEEN)
def test_one_warning_names_what_is_not_seen(name: str, batch_dim: int | None) -> None:
    """With its place and cost, at the user's line, and once for an engine."""
    of, text = UNSEEN[name]
    model = Model()
    engine = Engine(model, batch_dim=batch_dim)
    with pytest.warns(UnseenUseWarning, match=f"{text}.*5 vector-Jacobian products") as found:
        engine.jacobian(of(model, torch.randn(5, 3)), keep="factors")
    assert len(found) == 1
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.jacobian(of(model, torch.randn(5, 3)), keep="factors")


@pytest.mark.parametrize("name", UNSEEN)
def test_nothing_is_told_where_all_parameters_have_rows(name: str) -> None:
    """By a pass for each objective of the whole batch, where being unseen costs nothing."""
    of, _ = UNSEEN[name]
    model = Model()
    engine = Engine(model, batch_dim=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = of(model, torch.randn(5, 3))
        jacobian = reference_jacobian(losses, model.parameters())
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen_may_be_refused(name: str) -> None:
    of, text = UNSEEN[name]
    model = Model()
    engine = Engine(model, unseen="error")
    for _ in range(2):
        with pytest.raises(UnseenUseError, match=f'{text}.*pass `unseen="rows"`'):
            engine.compute_gramian(of(model, torch.randn(5, 3)))
    losses = model(torch.randn(5, 3)).square().sum(1)
    jacobian = reference_jacobian(losses, model.parameters())
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


def test_another_value_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"`unseen` is 'warn'.*Pass \"rows\" to compute"):
        Engine(Model(), unseen="warn")  # type: ignore[arg-type]


def test_no_warning_of_what_is_seen() -> None:
    """A call without a rule is seen."""
    model = Model()
    engine = Engine(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.compute_gramian(model(torch.randn(5, 3)).square().sum(1))


def test_reentrant_checkpoints_are_refused() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    model = Checkpointed()
    engine = Engine(model)
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        model(torch.randn(5, 3, requires_grad=True))
    assert engine is not None


def test_a_freed_graph_behind_an_index() -> None:
    model = Model()
    engine = Engine(model)
    losses = model(torch.randn(5, 3)).square().sum(1)[torch.tensor([0, 2])]
    losses.sum().backward()
    with pytest.raises(FreedGraphError, match="retain_graph=True"):
        engine.compute_gramian(losses)


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")  # losses in another order
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_an_order_that_changes(join: Callable[[list[Tensor]], Tensor]) -> None:
    """The same calls on parts of the batch, in another order at the next step."""
    model = Model()
    engine = Engine(model)
    for order in ([0, 1, 2], [1, 2, 0]):
        parts = model(torch.randn(3, 3)).unbind(0)
        joined = join([parts[i].unsqueeze(0) for i in order])
        losses = joined.square().flatten(1).sum(1)
        jacobian = reference_jacobian(losses, model.parameters())
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


def test_a_margin_that_is_exceeded_later() -> None:
    """Samples that begin to interact at the fourth call, where the engine looks again."""
    model = Model()
    engine = Engine(model, batch_dim=0)
    x = torch.randn(4, 3)
    for margin in (-1e3, -1e3, -1e3):
        outputs = model(x)
        apart = (outputs[:, None] - outputs).square().sum((1, 2))
        engine.compute_gramian(outputs.square().sum(1) + F.relu(margin + apart))
    outputs = model(x)
    apart = (outputs[:, None] - outputs).square().sum((1, 2))
    with pytest.raises(ValueError, match="samples are mixed"):
        engine.compute_gramian(outputs.square().sum(1) + F.relu(1e3 + apart))


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
def test_a_parameter_without_an_element() -> None:
    model = nn.Linear(3, 1)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    losses = model(torch.randn(4, 3)).squeeze(1) + model.empty.sum()
    jacobian = Engine(model).jacobian(losses)
    rows = reference_jacobian(losses, model.parameters())
    assert_close_to_reference(jacobian.gramian(), rows @ rows.T)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    flat = torch.cat([x.flatten() for x in direction.values()])
    assert_close_to_reference(jacobian.jvp(direction), rows @ flat)
