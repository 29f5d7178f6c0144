"""Parameters used only where nothing was recorded: every call of the engine is exact."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, features, trainable
from tests.unit.engines import batch, per_sample

Losses = Callable[[Tensor], Tensor]

EACH = [
    pytest.param(per_sample, id="(B,)"),
    pytest.param(lambda output: features(output, 3), id="(B, K)"),
]


class Model(nn.Module):
    """Two layers, a parameter that no way of calling it uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(3, 4), nn.Linear(2, 2), nn.Linear(4, 2)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).tanh())
        return y


def compiled(backend: str) -> Callable[[Model, Engine, Tensor], Tensor]:
    return lambda model, _, x: torch.compile(model, backend=backend)(x)


def paused(model: Model, engine: Engine, x: Tensor) -> Tensor:
    with engine.paused():
        y: Tensor = model(x)
    return y


def bare(model: Model, engine: Engine, x: Tensor) -> Tensor:
    """As another method would do it."""
    del engine
    hidden = (x @ model.first.weight.T + model.first.bias).tanh()
    return hidden @ model.last.weight.T + model.last.bias


FORWARDS: dict[str, Callable[[Model, Engine, Tensor], Tensor]] = {
    "eager": compiled("eager"),
    "aot_eager": compiled("aot_eager"),
    "vmap": lambda model, _, x: torch.func.vmap(model)(x),
    "paused": paused,
    "bare": bare,
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet, and a compiled graph may be kept, as the references need it."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        yield
    torch._dynamo.reset()


def joined(model: nn.Module) -> Tensor:
    """The gradients of all trainable parameters."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
    return torch.cat([g.flatten() for g in found])


@pytest.mark.filterwarnings("ignore")  # of the compiler, and of what is not seen
@pytest.mark.parametrize("losses_of", EACH)
@pytest.mark.parametrize("name", FORWARDS)
class TestNothingRecorded:
    """There is no recording at all, or one that knows nothing of these parameters."""

    def test_step(self, name: str, losses_of: Losses) -> None:
        """Gradients come once, also on top of others, and of leaves that are not the engine's."""
        model = Model()
        engine = Engine(model, batch_dim=0)
        for n in (4, 4, 3):
            x = batch(n, 3).requires_grad_()
            losses = losses_of(FORWARDS[name](model, engine, x))
            expected = reference_jacobian(losses, trainable(model))
            w = batch(losses.numel())
            (of_input,) = torch.autograd.grad(losses, x, w.view_as(losses), retain_graph=True)
            before = joined(model)
            _, gramian = engine.backward(
                losses, lambda _, w=w: w, return_gramian=True, gradients_outside="weighted"
            )
            assert_close_to_reference(gramian, expected @ expected.T)
            assert_close_to_reference(joined(model) - before, w @ expected)
            assert x.grad is not None
            assert_close_to_reference(x.grad, of_input)

    def test_jacobian(self, name: str, losses_of: Losses) -> None:
        """All columns are there, in order, with those of zeros."""
        model = Model()
        engine = Engine(model, batch_dim=0)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        for _ in range(2):
            losses = losses_of(FORWARDS[name](model, engine, batch(4, 3)))
            expected = reference_jacobian(losses, trainable(model))
            jacobian = engine.jacobian(losses)
            assert jacobian.names == names
            assert jacobian.shape == tuple(expected.shape)
            assert_close_to_reference(jacobian.dense(), expected)
            assert_close_to_reference(jacobian.gramian(), expected @ expected.T)
            assert_close_to_reference(jacobian.row_norms(), expected.norm(dim=1))
            w = batch(losses.numel())
            found = jacobian.vjp(w)
            assert list(found) == names
            assert_close_to_reference(
                torch.cat([g.flatten() for g in found.values()]), w @ expected
            )
            jacobian.accumulate_grad(w)
            assert_close_to_reference(joined(model), w @ expected)
            model.zero_grad()

    def test_beside_what_is_recorded(self, name: str, losses_of: Losses) -> None:
        """With another forward pass among the losses, or alive and not among them."""
        model = Model()
        engine = Engine(model, batch_dim=0)
        for is_among in (True, False, True):
            x = batch(4, 3)
            recorded, other = model(x), FORWARDS[name](model, engine, x)
            losses = losses_of(recorded * other if is_among else other)
            expected = reference_jacobian(losses, trainable(model))
            assert_close_to_reference(engine.jacobian(losses).dense(), expected)
            w = batch(losses.numel())
            engine.backward(losses, lambda _, w=w: w)
            assert_close_to_reference(joined(model), w @ expected)
            model.zero_grad()
            del recorded


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
def test_a_forward_pass_from_before_the_engine() -> None:
    model = Model()
    losses = per_sample(model(batch(4, 3)))
    engine = Engine(model)
    expected = reference_jacobian(losses, trainable(model))
    assert_close_to_reference(engine.jacobian(losses).dense(), expected)
    engine.backward(losses, lambda gramian: gramian.diagonal())
    w = (expected @ expected.T).diagonal()
    assert_close_to_reference(joined(model), w @ expected)


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
def test_a_layer_that_was_exchanged_meanwhile() -> None:
    """The old one and the new one are among the losses, of which one recording knows each."""
    model = Model()
    engine = Engine(model, batch_dim=0, verify="never")
    old = model.first.weight
    x = batch(4, 3)
    before = model(x)
    model.first.weight = nn.Parameter(batch(4, 3))
    with engine.paused():
        after = model(x)
    losses = per_sample(before * after)
    parameters = [old, *trainable(model)]
    expected = reference_jacobian(losses, parameters)
    assert_close_to_reference(engine.compute_gramian(losses), expected @ expected.T)
    w = batch(4)
    engine.backward(losses, lambda _: w)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    assert_close_to_reference(torch.cat([g.flatten() for g in found]), w @ expected)


def test_no_losses_at_all() -> None:
    """All columns are there, and no row, also before the first forward pass."""
    model = Model()
    engine = Engine(model)
    losses = (model.first.weight.sum() * batch(4))[:0]
    jacobian = engine.jacobian(losses)
    assert jacobian.shape == (0, sum(p.numel() for p in trainable(model)))
    assert jacobian.dense().shape == jacobian.shape


@pytest.mark.filterwarnings("ignore")
def test_several_modules_of_which_one_is_compiled() -> None:
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 2)
    engine = Engine(trunk, head, batch_dim=0)
    fast = torch.compile(head, backend="aot_eager")
    parameters: list[Any] = [*trunk.parameters(), *head.parameters()]
    for _ in range(3):
        losses = per_sample(fast(trunk(batch(4, 3)).tanh()))
        expected = reference_jacobian(losses, parameters)
        w = batch(4)
        assert_close_to_reference(engine.jacobian(losses).dense(), expected)
        engine.backward(losses, lambda _, w=w: w)
        found = torch.cat([p.grad.flatten() for p in parameters])
        assert_close_to_reference(found, w @ expected)
        for p in parameters:
            p.grad = None


@pytest.mark.filterwarnings("ignore")
def test_gradients_are_those_of_a_model_without_an_engine() -> None:
    """Under a compiled model, in an ordinary backward pass beside ours."""
    model = Model()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    x = batch(4, 3)
    fast = torch.compile(model, backend="aot_eager")
    engine.backward(per_sample(fast(x)), lambda gramian: torch.ones(len(gramian)))
    per_sample(twin(x)).sum().backward()
    assert_close_to_reference(joined(model), joined(twin))
