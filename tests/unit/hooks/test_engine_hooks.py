"""The hooks of an engine: modules whose parameters are taken out of J, and put back."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from autogram import Engine, NotConnectedError, UnsupportedError
from autogram.testing import reference_jacobian


class Model(nn.Module):
    """An encoder with parts, a head, and a weight that both of them have."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4)))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.encoder[2][0].weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.head(self.encoder(x)) * self.scale).square().sum(1)
        return out


def gramian_of(losses: Tensor, parameters: Iterator[Tensor] | list[Tensor]) -> Tensor:
    jacobian = reference_jacobian(losses, parameters)
    return jacobian @ jacobian.T


def test_series_of_steps_in_which_hooks_are_switched() -> None:
    """Each Gramian is that of the parameters whose modules were active in its forward pass."""
    model = Model()
    engine = Engine(model)
    encoder, inner = model.encoder, model.encoder[2]
    by_name = dict(model.named_parameters())
    every = list(by_name)
    without_encoder = ["scale", "encoder.2.0.weight", "head.bias"]  # the head has the weight too
    without_inner = [name for name in every if name != "encoder.2.0.bias"]
    steps: list[tuple[Callable[[], None], list[str]]] = [
        (lambda: None, every),
        (lambda: engine.hooks.deactivate(module=encoder), without_encoder),
        (lambda: None, without_encoder),
        (lambda: engine.hooks.activate(module=inner), [*without_encoder, "encoder.2.0.bias"]),
        (lambda: engine.hooks.activate(module=encoder), every),
        (lambda: engine.hooks.deactivate(module=inner), without_inner),
        (
            lambda: engine.hooks.deactivate(module=model.head),
            [n for n in without_inner if n not in ("encoder.2.0.weight", "head.bias")],
        ),
        (lambda: engine.hooks.activate(), every),
        (lambda: None, every),
    ]
    for size, (switch, names) in enumerate(steps, 4):
        switch()
        losses = model(torch.randn(size, 3))
        parameters = [by_name[name] for name in names]
        expected = gramian_of(losses, parameters)
        assert_close(engine.compute_gramian(losses), expected)
        jacobian = engine.jacobian(losses)
        assert sorted(jacobian.names) == sorted(names)
        assert_close(jacobian.gramian(), expected)
        engine.verify(losses)
        left_out = {n for n, why in engine.report().uncovered.items() if "left out of J" in why}
        assert left_out == set(every) - set(names)


def test_a_container_is_shown_as_it_is() -> None:
    """The table has the state of each module, and says what is in J."""
    model = Model()
    engine = Engine(model)
    engine.hooks.deactivate(module=model.encoder)
    engine.hooks.activate(module=model.encoder[0])
    rows = [line.split() for line in str(engine.hooks).splitlines()[1:]]
    states = {row[0]: row[-1] for row in rows}
    names = {name.split("[")[1].rstrip("]"): state for name, state in states.items()}
    is_off = ["encoder", "encoder.2", "encoder.2.0"]  # the module without parameters has no hook
    assert [name for name, state in names.items() if state == "inactive"] == is_off
    jacobian = engine.jacobian(model(torch.randn(4, 3)))
    assert "encoder.0.weight" in jacobian.names
    assert "encoder.2.0.bias" not in jacobian.names


def test_modules_that_came_later_are_as_their_container() -> None:
    """They have no hook of their own."""
    model = Model()
    engine = Engine(model)
    model.encoder.append(nn.Linear(4, 4))
    names = {"encoder.3.weight", "encoder.3.bias"}
    assert names <= {*engine.jacobian(model(torch.randn(4, 3))).names}
    engine.hooks.deactivate(module=model.encoder)
    assert not names & {*engine.jacobian(model(torch.randn(4, 3))).names}


def test_the_step_gives_gradients_to_what_is_left_out() -> None:
    """As to any other leaf: of the sum of the losses, or of the losses with the weights."""
    model = Model()
    engine = Engine(model)
    engine.hooks.deactivate(module=model.encoder)
    for size in (5, 6, 5):
        losses = model(torch.randn(size, 3))
        weights = torch.rand(size)
        expected = torch.autograd.grad(losses @ weights, [*model.parameters()], retain_graph=True)
        model.zero_grad()
        engine.backward(losses, lambda _, weights=weights: weights, gradients_outside="weighted")
        assert_close([p.grad for p in model.parameters()], [*expected])


def test_blocks_and_threads_of_pausing() -> None:
    """A block puts the hooks back; `paused` is another thing, and leaves all parameters unseen."""
    model = Model()
    engine = Engine(model)
    with engine.hooks.inactive(module=model.head):
        losses = model(torch.randn(4, 3))
    assert_close(
        engine.compute_gramian(losses),
        gramian_of(losses, [p for n, p in model.named_parameters() if n != "head.bias"]),
    )
    assert engine.hooks.is_active
    losses = model(torch.randn(4, 3))
    assert_close(engine.compute_gramian(losses), gramian_of(losses, model.parameters()))


def test_losses_of_an_earlier_forward_pass_keep_their_parameters() -> None:
    """What counts is the forward pass, whatever was switched since."""
    model = Model()
    engine = Engine(model)
    before = model(torch.randn(4, 3))
    engine.hooks.deactivate(module=model.encoder)
    behind = model(torch.randn(4, 3))
    assert_close(engine.compute_gramian(before), gramian_of(before, model.parameters()))
    kept = [model.scale, model.head.weight, model.head.bias]
    assert_close(engine.compute_gramian(behind), gramian_of(behind, kept))
    with pytest.raises(UnsupportedError, match=r"hooks on a module were switched in between"):
        engine.compute_gramian(before + behind)


def test_everything_left_out() -> None:
    """There is no J then."""
    model = Model()
    engine = Engine(model)
    engine.hooks.deactivate(module=model)
    losses = model(torch.randn(4, 3))
    with pytest.raises(NotConnectedError):
        engine.compute_gramian(losses)
    engine.hooks.activate()
    losses = model(torch.randn(4, 3))
    assert_close(engine.compute_gramian(losses), gramian_of(losses, model.parameters()))


def test_several_modules() -> None:
    """Their names begin with their positions, in ids as in reports."""
    encoder, head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)
    engine = Engine(encoder, head)
    assert [h.id for h in engine.hooks] == ["autogram[0]", "autogram[0.0]", "autogram[1]"]
    engine.hooks.deactivate(module=engine.hooks["autogram[0]"].module)
    losses = head(encoder(torch.randn(5, 3))).square().squeeze(1)
    assert_close(engine.compute_gramian(losses), gramian_of(losses, head.parameters()))


def test_a_penalty_on_what_is_left_out() -> None:
    """It reaches the losses past every tap, and is no part of J either."""
    model = Model()
    engine = Engine(model, unseen="error")
    engine.hooks.deactivate(module=model.encoder)
    losses = model(torch.randn(4, 3)) + model.encoder[0].weight.square().sum()
    kept = [model.scale, model.head.weight, model.head.bias]
    assert_close(engine.compute_gramian(losses), gramian_of(losses, kept))


def test_hooks_go_with_the_engine() -> None:
    model = Model()
    with Engine(model) as engine:
        manager = engine.hooks
        assert len(manager) == 6
    assert len(manager) == 0
