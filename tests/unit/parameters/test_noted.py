"""Forward passes whose results the losses read past every tap: their parameters are those of J."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from autogram import Engine, UnsupportedError
from autogram.testing import reference_jacobian


class Hyper(nn.Module):
    """Makes the weights of a layer from parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(3).double())
        self.trunk, self.head = nn.Linear(3, 6).double(), nn.Linear(6, 8).double()
        self.kept: Any = None

    def forward(self) -> Tensor:
        made: Tensor = self.head(self.trunk(self.code).tanh()).view(2, 4)
        return made

    def rest(self) -> list[Tensor]:
        """All parameters but those of the trunk."""
        return [self.code, *self.head.parameters()]


class Keeping(Hyper):
    """Keeps its result, and returns nothing."""

    def forward(self) -> None:  # type: ignore[override]
        self.kept = super().forward()


class InPlace(Hyper):
    """Returns a view, whose base is changed in place behind the pass."""

    def forward(self) -> Tensor:
        self.kept = super().forward().clone()
        return self.kept.flatten()  # type: ignore[no-any-return]


class Several(Hyper):
    """Has a tap, too, on what the losses do not read."""

    def forward(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(), self.trunk(torch.ones(5, 3).double())


def _of_kept(model: Hyper) -> Tensor:
    model()
    return model.kept  # type: ignore[no-any-return]


def _changed(model: Hyper) -> Tensor:
    made = model()
    model.kept.mul_(2)
    return made.view(2, 4)


WAYS: dict[str, tuple[type[Hyper], Callable[[Any], Tensor]]] = {
    "returned": (Hyper, lambda m: m()),
    "kept by the module": (Keeping, _of_kept),
    "a view whose base is changed": (InPlace, _changed),
    "beside a result with a tap": (Several, lambda m: m()[0]),
}


def losses_of(weight: Tensor, samples: int) -> Tensor:
    x = torch.randn(samples, 4).double()
    return F.linear(x, weight).tanh().square().sum(1)


def replace_head(model: Hyper) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def assert_exact(engine: Engine, losses: Tensor, parameters: list[Tensor]) -> None:
    jacobian = reference_jacobian(losses, parameters)
    assert_close(engine.compute_gramian(losses), jacobian @ jacobian.T)
    assert_close(engine.jacobian(losses).gramian(), jacobian @ jacobian.T)


@pytest.mark.parametrize("verify", ["never", "always"])
@pytest.mark.parametrize("way", WAYS)
def test_steps_in_which_hooks_are_switched_and_parameters_replaced(way: str, verify: Any) -> None:
    kind, weight_of = WAYS[way]
    model = kind()
    engine = Engine(model, verify=verify)
    for step, samples in enumerate((5, 5, 5, 6, 5, 5)):
        parameters = [*model.parameters()]
        is_switched = step in (1, 4)
        if is_switched:
            parameters = model.rest()
            with engine.hooks.inactive(module=model.trunk):
                losses = losses_of(weight_of(model), samples)
        else:
            losses = losses_of(weight_of(model), samples)
        if step in (2, 4):
            replace_head(model)
        if step == 5:
            engine.hooks.deactivate(module=model.trunk)
        assert_exact(engine, losses, parameters)
        why = engine.report().uncovered
        assert ("trunk.weight" in why) == is_switched


class Target(nn.Module):
    """A layer whose weights are given, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 3).double()

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = self.out(F.linear(x, weight).tanh())
        return found.square().sum(1)


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")  # of the given weights
def test_a_second_forward_pass_reads_what_a_first_has_made() -> None:
    """Its uses are of parameters of both, and J has a meaning if both had the same hooks."""
    hyper, target = Hyper(), Target()
    engine = Engine(hyper, target)
    x = torch.randn(5, 4).double()
    for is_replaced in (False, True, False):
        weight, parameters = hyper() * 2, [*hyper.parameters(), *target.parameters()]
        if is_replaced:
            replace_head(hyper)
        assert_exact(engine, target(x, weight), parameters)
    with engine.hooks.inactive(module=hyper.trunk):
        losses = target(x, hyper())
    assert_exact(engine, losses, [*hyper.rest(), *target.parameters()])
    with engine.hooks.inactive(module=hyper.trunk):
        weight = hyper()
    with pytest.raises(UnsupportedError, match=r"switched in between.*`0\.trunk\.weight`"):
        engine.compute_gramian(target(x, weight))
    weight = hyper()
    with engine.hooks.inactive(module=hyper.trunk):
        losses = target(x, weight)
    with pytest.raises(UnsupportedError, match=r"switched in between.*`0\.trunk\.weight`"):
        engine.compute_gramian(losses)


def test_losses_read_results_of_passes_with_other_hooks() -> None:
    """Past every tap one of them, and behind a tap the other."""
    hyper, target = Hyper(), Target()
    engine = Engine(hyper, target)
    weight, x = hyper(), torch.randn(5, 4).double()
    with engine.hooks.inactive(module=hyper.trunk):
        losses = target(x, torch.randn(2, 4).double())
    assert_exact(engine, losses, [*target.parameters()])
    with pytest.raises(UnsupportedError, match=r"switched in between.*`0\.trunk\.weight`"):
        engine.compute_gramian(losses + F.linear(x, weight).sum(1))
    with engine.hooks.inactive(module=hyper.trunk):
        weight = hyper()
    losses = target(x, torch.randn(2, 4).double()) + F.linear(x, weight).square().sum(1)
    assert_exact(engine, losses, [*hyper.rest(), *target.parameters()])


def test_two_engines_note_their_own_passes() -> None:
    model = Hyper()
    first, second = Engine(model), Engine(model)
    with first.hooks.inactive(module=model.trunk):
        losses = losses_of(model(), 5)
    assert_exact(first, losses, model.rest())
    assert_exact(second, losses, [*model.parameters()])
