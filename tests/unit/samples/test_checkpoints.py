"""Parts that run again in the backward pass: what decides there is read in a run of its own."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autogram import Engine
from tests.unit.engines import assert_exact
from tests.unit.samples.parts import Kept, Squared


def _routed(layer: nn.Module, x: Tensor) -> Tensor:
    """The largest features choose which rows go through the layer."""
    chosen = torch.where(x.argmax(-1) < 3)[0]
    return torch.zeros_like(x).index_add(0, chosen, layer(x[chosen]))


def _sorted(layer: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return torch.zeros_like(x).index_copy(0, order, layer(x[order]).tanh())


def _masked(layer: nn.Module, x: Tensor) -> Tensor:
    """Each row sees those of its own half, by zeros of a constant matrix."""
    mask = torch.eye(len(x)) * x.detach().sign().abs().mean()
    return mask @ layer(x)


def _of_function(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = Squared.apply(layer(x))  # type: ignore[no-untyped-call]  # as typed in torch
    return result


def _changed(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x).clone()
    y[:, :2] *= layer(x)[:, 2:4]
    return y


def _by_activation(layer: nn.Module, x: Tensor) -> Tensor:
    """Zeros of an activation that requires a gradient."""
    return layer(x) * layer(x).relu()


PARTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "routed": _routed,
    "sorted": _sorted,
    "masked": _masked,
    "Function": _of_function,
    "changed slice": _changed,
    "activation": _by_activation,
}


def _nested(part: Callable[..., Tensor], layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(part, layer, x.tanh(), use_reentrant=False) + x  # type: ignore[no-any-return]


class Model(nn.Module):
    """A layer, a checkpoint with another one, and a third layer."""

    def __init__(self, part: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.part, self.options, self.runs = part, options, 0

    def _counted(self, layer: nn.Module, x: Tensor) -> Tensor:
        self.runs += 1
        return self.part(layer, x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).tanh()
        x = checkpoint(self._counted, self.layers[1], x, use_reentrant=False, **self.options)
        result: Tensor = self.layers[2](x)
        return result


@pytest.mark.parametrize("is_nested", [False, True], ids=["one", "nested"])
@pytest.mark.parametrize("name", PARTS)
def test_places_are_inferred(name: str, *, is_nested: bool) -> None:
    part = PARTS[name]
    model = Model((lambda *given: _nested(part, *given)) if is_nested else part)
    engine = Engine(model)
    for size in (5, 5, 3, 5):
        assert_exact(engine, model(torch.randn(size, 6)).square().sum(1), model)
        assert engine.report().samples > 1


def test_a_part_runs_again_once_to_be_read() -> None:
    """However much is read, and once for the pass itself."""
    model = Model(lambda layer, x: _routed(layer, _sorted(layer, x)))
    engine = Engine(model, verify="never")
    losses = model(torch.randn(5, 6)).square().sum(1)
    model.runs = 0
    engine.compute_gramian(losses)
    assert model.runs == 2


@pytest.mark.parametrize("name", PARTS)
def test_nothing_that_was_read_stays(name: str) -> None:
    part = Kept(PARTS[name])
    model = Model(part)
    engine = Engine(model)
    for _ in range(3):
        losses = model(torch.randn(5, 6)).square().sum(1)
        engine.compute_gramian(losses)
        gc.collect()
        assert part.alive() == 0
        del losses


def test_other_hooks_of_saved_tensors() -> None:
    """Those that only pack are read as they are."""
    model = nn.Linear(6, 6)
    engine = Engine(model)
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            losses = _sorted(model, torch.randn(5, 6)).square().sum(1)
        assert_exact(engine, losses, model)
        assert engine.report().samples > 1
