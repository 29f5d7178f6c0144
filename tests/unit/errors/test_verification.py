"""The comparison with an ordinary backward pass: right answers pass, and every fault is found."""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import (
    CoupledObjectivesWarning,
    Engine,
    InvalidOptionError,
    NonFiniteError,
    UnverifiedWarning,
    VerificationError,
)
from autogram.rules import Recipe, find_rule, product, register_rule, unregister_rule
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, features
from tests.unit.engines import assert_exact, batch, mlp, per_sample
from tests.unit.environment import DEVICE
from tests.unit.networks import Recurrent

# How many random vectors right answers are verified with; `make fuzz` takes more.
DRAWS = int(os.environ.get("AUTOGRAM_FUZZ_EXAMPLES", "200"))


class Language(nn.Module):
    """Tied embedding, attention, normalisation: biases of keys have a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return x @ self.embedding.weight.T


class Bias(nn.Module):
    """A bias in front of a normalisation that removes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 6), nn.LayerNorm(6, bias=False)
        self.shift = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x) + self.shift)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(36, 3)
    )


RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convolutions": (convolutional, lambda: batch(5, 2, 5, 5)),
    "language": (Language, lambda: torch.randint(11, (5, 7))),
    "recurrent": (Recurrent, lambda: batch(5, 4)),
    "cancelling bias": (Bias, lambda: batch(5, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_pass_many_draws(name: str, dtype: torch.dtype) -> None:
    make_model, make_input = RIGHT[name]
    model, x = make_model().to(dtype), make_input()
    x = x.to(dtype) if x.is_floating_point() else x
    engine = Engine(model, batch_dim=0)
    losses = model(x).square().flatten(1).sum(1)
    assert losses.dtype == dtype
    for _ in range(DRAWS):
        engine.verify(losses)


@pytest.mark.parametrize("batch_dim", [0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_objectives_per_sample_pass(dtype: torch.dtype, batch_dim: int | None) -> None:
    """Their cotangents are rounded one by one here, and together in the ordinary pass."""
    model = convolutional().to(dtype)
    engine = Engine(model, batch_dim=batch_dim)
    losses = features(model(batch(6, 2, 5, 5).to(dtype)), 4)
    for _ in range(50):
        engine.verify(losses)


def test_lower_precision_inside_passes() -> None:
    """Under autocast, parameters and losses show nothing of the precision of the products."""
    model = mlp().float()
    engine = Engine(model, verify="always")
    for _ in range(100):
        with torch.autocast(DEVICE, torch.bfloat16):
            output = model(batch(6, 3).float())
        losses = per_sample(output.float())
        assert losses.dtype == torch.float32
        engine.compute_gramian(losses)


def test_parameters_in_float8_pass() -> None:
    """A weight that is kept in eight bits, and cast where it is used: so is its gradient."""

    class Model(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.to(x.dtype)

    model = Model(batch(4, 3).to(torch.float8_e5m2))
    twin, x = Model(model.weight.detach().to(torch.get_default_dtype())), batch(5, 4)
    jacobian = reference_jacobian(per_sample(twin(x)), twin.parameters())
    engine = Engine(model, verify="always")
    for _ in range(3):
        assert_close_to_reference(
            engine.compute_gramian(per_sample(model(x))), jacobian @ jacobian.T
        )


def test_sparse_gradients_pass() -> None:
    model = nn.Embedding(7, 4, sparse=True)
    engine = Engine(model)
    engine.verify(per_sample(model(torch.randint(7, (5, 3))).sin()))


def test_gradients_that_vanish_pass() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(60)]
    for layer in layers:
        nn.init.constant_(layer.weight, 0.05)  # a fifth of the gradient goes through
    model = nn.Sequential(*layers).float()
    engine = Engine(model, verify="always")

    gramian = engine.compute_gramian(model(torch.ones(3, 4, dtype=torch.float32)).sum(1))

    assert (gramian == 0).all()  # below 1e-45, the smallest number of float32


def test_an_empty_batch_passes() -> None:
    model = mlp()
    Engine(model).verify(per_sample(model(batch(0, 3))))


# Faults


def weighted(input: Tensor, one: Tensor, weight: Tensor, scale: float) -> list[Recipe]:
    """A rule of `addcmul`."""
    assert input.dim() == one.dim() == 2
    return [product(weight, "to,to->o", one, scale=scale)]


class Custom(nn.Module):
    """A call of `addcmul` between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.addcmul(x, x, self.weight).tanh())


@pytest.fixture
def register() -> Iterator[Callable[[float], None]]:
    """Registers a rule of `addcmul` whose blocks are multiplied by a number."""

    def register(scale: float) -> None:
        def addcmul_rule(input: Tensor, one: Tensor, weight: Tensor) -> list[Recipe]:
            return weighted(input, one, weight, scale)

        register_rule(torch.addcmul)(addcmul_rule)

    assert find_rule(torch.addcmul) is None
    yield register
    unregister_rule(torch.addcmul)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float64, 1 + 1e-6), (torch.float64, 0.99), (torch.float32, 1.01)],
    ids=str,
)
@pytest.mark.parametrize("batch_dim", [0, "auto"])
def test_a_rule_that_is_slightly_wrong(
    register: Callable[[float], None], dtype: torch.dtype, scale: float, batch_dim: Any
) -> None:
    """Its function and place are named, and no other parameter is blamed."""
    register(scale)
    model = Custom().to(dtype)
    engine = Engine(model, batch_dim=batch_dim)
    losses = per_sample(model(batch(5, 3).to(dtype)))
    place = r"rules `tests\.unit\.errors\..*addcmul_rule` are not autogram's own"
    with pytest.raises(VerificationError, match=place) as found:
        engine.compute_gramian(losses)
    assert set(found.value.gaps) == {"weight"}
    assert "`addcmul`" in str(found.value)


def test_a_wrong_rule_is_not_asked_for_rows_of_the_whole_batch(
    register: Callable[[float], None],
) -> None:
    register(2)
    model = Custom()
    assert_exact(Engine(model, batch_dim=None), per_sample(model(batch(5, 3))), model)


def test_a_rule_that_is_right(register: Callable[[float], None]) -> None:
    register(1)
    model = Custom()
    assert_exact(Engine(model, verify="always"), per_sample(model(batch(5, 3))), model)


# When, and what it leaves alone


def test_another_mode_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r'`verify` is True.*Pass "first"'):
        Engine(mlp(), verify=True)  # type: ignore[arg-type]


def test_nothing_of_the_users_changes() -> None:
    """Random state, accumulated and retained gradients, hooks on parameters, and the graph."""
    model = mlp()
    engine = Engine(model, verify="always")
    calls: list[Tensor] = []
    model[0].weight.register_hook(lambda g: calls.append(g) or 0 * g)
    model[0].bias.register_post_accumulate_grad_hook(calls.append)
    model[2].weight.grad = torch.ones(2, 5)
    hidden = model[0](batch(5, 3))
    hidden.retain_grad()
    losses = per_sample(model[2](hidden.tanh()))
    state = torch.get_rng_state()

    engine.compute_gramian(losses)

    assert torch.equal(torch.get_rng_state(), state)
    assert calls == []
    assert torch.equal(model[2].weight.grad, torch.ones(2, 5))
    assert model[0].weight.grad is None
    losses.sum().backward()
    assert len(calls) == 2
    assert not model[0].weight.grad.any()


def test_gradients_retained_in_the_forward_are_put_back() -> None:
    class Retaining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.first(x)
            self.hidden.retain_grad()
            return self.last(self.hidden.tanh())

    model = Retaining()
    engine = Engine(model, verify="always")
    engine.compute_gramian(per_sample(model(batch(5, 3))))
    assert model.hidden.grad is None


def test_frozen_and_unused_parameters() -> None:
    model = nn.ModuleDict({"used": mlp(), "frozen": mlp(), "unused": mlp()})
    model["frozen"].requires_grad_(False)
    engine = Engine(*model.values(), verify="always")
    x = batch(5, 3)
    losses = per_sample(model["used"](x) + model["frozen"](x))
    assert_exact(engine, losses, model["used"])


# Values that are not finite


def test_a_sample_that_is_not_finite() -> None:
    """No rule is blamed; the row is named, and nothing else of the Gramian is concerned."""
    model = mlp()
    engine = Engine(model, verify="always")
    x = batch(5, 3)
    expected = engine.compute_gramian(per_sample(model(x)))
    x[3, 1] = torch.nan
    losses = per_sample(model(x))
    with pytest.warns(UnverifiedWarning, match="objectives 3 .*Only their rows") as found:
        gramian = engine.compute_gramian(losses)
    assert found[0].filename == __file__
    others = [0, 1, 2, 4]
    torch.testing.assert_close(gramian[others][:, others], expected[others][:, others])
    with pytest.raises(
        NonFiniteError, match="cannot be verified: the gradients of the objectives 3"
    ):
        engine.verify(losses)


def test_an_ordinary_pass_that_overflows() -> None:
    """In half precision, a sum over the batch may be too large where no sample is."""
    model = nn.Linear(2, 1, bias=False).half()
    engine = Engine(model, batch_dim=0)
    losses = model(torch.full((99, 2), 6e4, dtype=torch.float16)).squeeze(1)
    with pytest.raises(NonFiniteError, match=r"gradients of `weight`.*their sum overflows"):
        engine.verify(losses)


def test_no_warning_without_a_reason() -> None:
    model = mlp()
    engine = Engine(model, verify="always")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.compute_gramian(per_sample(model(batch(5, 3))))


# Hooks that change gradients


def clipped(g: Tensor) -> Tensor:
    return g * (0.5 / g.norm()).clamp(max=1)


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda g: g - g.mean(0),
    "in another order": lambda g: g.roll(1, 0),
    "of the largest alone": lambda g: g * (g.abs() == g.abs().max()),
    "by sign": torch.sign,
    "clamped": lambda g: g.clamp(-0.1, 0.1),
    "clipped": clipped,
    "positive": torch.relu,
}
WAYS: list[Callable[[Any, Callable[[Tensor], Tensor]], object]] = [
    lambda hidden, hook: hidden.register_hook(hook),
    lambda hidden, hook: hidden.grad_fn.register_hook(lambda x, _: (hook(x[0]), *x[1:])),
    lambda hidden, hook: hidden.grad_fn.register_prehook(lambda x: (hook(x[0]),)),
]


@pytest.mark.parametrize("batch_dim", [0, "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS, ids=["tensor", "node", "before a node"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_on_gradients_is_found(
    name: str, way: Callable[..., object], dtype: torch.dtype, batch_dim: Any
) -> None:
    """By the check of the first call: autograd's graph shows no hook, or not what it does."""
    model = mlp().to(dtype)
    engine = Engine(model, batch_dim=batch_dim)
    hidden = model[0](batch(6, 3).to(dtype))
    way(hidden, HOOKS[name])
    losses = per_sample(model[1:](hidden))
    with pytest.raises((CoupledObjectivesWarning, VerificationError), match="hook"):
        engine.compute_gramian(losses)
