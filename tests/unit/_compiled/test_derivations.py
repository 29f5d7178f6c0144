"""What parts compute of parameters alone, and compute again for rows: only what gives the same."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import Engine
from tests.unit._compiled.compiling import assert_step, compiled
from tests.unit.checks import trainable

pytestmark = pytest.mark.slow


class _Derived(nn.Module):
    """A layer with a weight that is computed from parameters."""

    def __init__(self, weight_of: Callable[["_Derived"], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.weight_of = nn.Linear(3, 4), nn.Linear(4, 2), weight_of
        self.w, self.v = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.register_buffer("means", torch.zeros(4))
        self.register_buffer("variances", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.first(x).tanh(), self.weight_of(self))
        found: Tensor = self.last(x.sin())
        return found.square().sum(1)


def _assert_steps(weight_of: Callable[[_Derived], Tensor], *, is_repeated: bool) -> None:
    """Assert that an engine is right in a few steps, and whether it computes the weight again."""
    model = _Derived(weight_of)
    twin = copy.deepcopy(model)
    engine = Engine(model, verify="never")
    run = compiled(model)
    for step, size in enumerate((4, 4, 5)):
        x = torch.randn(size, 3)
        torch.manual_seed(step)
        expected = twin(x)
        torch.manual_seed(step)
        assert_step(engine, run(x), expected, trainable(model), trainable(twin))
    (uses,) = [of.uses for of in engine.report().parameters if of.name == "w"]
    assert [use.rule is not None for use in uses] == [is_repeated]


def _norm_without_gradients(model: _Derived) -> Tensor:
    with torch.no_grad():
        norm = model.w.norm()
    return model.w / norm


@torch.no_grad()
def _largest(w: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = w.abs().max(1, keepdim=True)
    return found


def _gradients_by_turns(model: _Derived) -> Tensor:
    with torch.no_grad():
        halved = model.w / 2
        with torch.enable_grad():
            product = model.v * halved
    return product + model.w * halved


WITHOUT_GRADIENTS: dict[str, Callable[[_Derived], Tensor]] = {
    "a norm": _norm_without_gradients,
    "one of two results": lambda model: model.w / _largest(model.w)[0],
    "by turns": _gradients_by_turns,
    "straight through": lambda model: model.w + (model.w.round() - model.w).detach(),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_without_gradients(name: str) -> None:
    """What was computed without gradients has none when it is computed again."""
    _assert_steps(WITHOUT_GRADIENTS[name], is_repeated=True)


def _attention(model: _Derived, dropout: float) -> Tensor:
    w, v = model.w.view(1, 2, 4, 2), model.v.view(1, 2, 4, 2)
    return F.scaled_dot_product_attention(w, v, v, dropout_p=dropout).view(4, 4)


@torch.library.custom_op("autogram_test::noisy", mutates_args=())
def _noisy(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


_noisy.register_fake(torch.empty_like)
_noisy.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[1] / ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


RANDOM: dict[str, Callable[[_Derived], Tensor]] = {
    "dropout": lambda model: F.dropout(model.w, 0.5),
    "attention": lambda model: _attention(model, 0.5),
    "a slope": lambda model: F.rrelu(model.w, training=True),
    "counts": lambda model: model.w * torch.poisson(model.v.detach().abs() * 3),
    "Gumbel's noise": lambda model: F.gumbel_softmax(model.w),
    "in a checkpoint": lambda model: checkpoint(
        lambda w: F.dropout(w.sin(), 0.5), model.w, use_reentrant=False
    ),
    "an operator of the user's": lambda model: _noisy(model.w),
}


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
@pytest.mark.cpu  # on a GPU, checkpoints that are compiled draw other numbers
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers(name: str) -> None:
    """They would be other ones."""
    _assert_steps(RANDOM[name], is_repeated=False)


NOT_RANDOM: dict[str, Callable[[_Derived], Tensor]] = {
    "dropout": lambda model: F.dropout(model.w, 0.5, training=False),
    "attention": lambda model: _attention(model, 0.0),
}


@pytest.mark.parametrize("name", NOT_RANDOM)
def test_no_random_numbers(name: str) -> None:
    """Functions that could draw some, and do not, are computed again."""
    _assert_steps(NOT_RANDOM[name], is_repeated=True)


TRANSFORMS: dict[str, Callable[[_Derived], Tensor]] = {
    "vmap": lambda model: torch.vmap(lambda w: w.sin() * w.sum())(model.w),
    "jvp": lambda model: torch.func.jvp(torch.sin, (model.w,), (model.v,))[1],
    "vjp": lambda model: torch.func.vjp(torch.sin, model.w)[1](model.v)[0],
}


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    """A piece of a graph that a transform has entered does not run without it."""
    _assert_steps(TRANSFORMS[name], is_repeated=False)
