"""Parameters outside of J: heads get the gradient of the sum of the losses, or of weighted ones."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torchjd.aggregation import UPGrad as UPGradOfRows
from torchjd.autojac import jac_to_grad, mtl_backward

from autogram import CoupledObjectivesWarning, Engine, InvalidOptionError
from autogram.weightings import UPGrad
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import batch
from tests.unit.jacobians import assert_gradients_are_close

Which = Literal["sum", "weighted"]


class Tasks(nn.Module):
    """A trunk, three heads of which two share a layer, and a parameter that no loss reaches."""

    def __init__(self, *, is_normed: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(6) if is_normed else nn.Identity()
        self.trunk = nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 5))
        self.both = nn.Linear(5, 5)
        self.heads = nn.ModuleList(nn.Linear(5, n) for n in (1, 2, 3))
        self.unused = nn.Parameter(torch.ones(2))

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.trunk(x).tanh()
        return features

    def losses(self, features: Tensor) -> list[Tensor]:
        """One loss for each task and sample, ``(B,)`` each, of different scales."""
        inputs = [features, self.both(features), self.both(features).sin()]
        outputs = [head(x) for head, x in zip(self.heads, inputs, strict=True)]
        return [(10.0**i) * (y.square() + y).sum(1) for i, y in enumerate(outputs)]

    def means(self, x: Tensor) -> list[Tensor]:
        """One loss for each task."""
        return [loss.mean() for loss in self.losses(self.features(x))]

    def outside(self) -> Iterator[nn.Parameter]:
        """The parameters that are not the trunk's."""
        inside = set(self.trunk.parameters())
        return (p for p in self.parameters() if p not in inside)


FORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "tensor": torch.stack,
    "list": lambda losses: losses,
    "dict": lambda losses: {f"task {i}": loss for i, loss in enumerate(losses)},
}


def step_of_torchjd(model: Tasks, x: Tensor) -> None:
    """Multi-task learning as torchjd has it, with ``.grad`` for all parameters."""
    features = model.features(x)
    means = [loss.mean() for loss in model.losses(features)]
    mtl_backward(means, features)
    jac_to_grad(list(model.trunk.parameters()), UPGradOfRows())


@pytest.mark.parametrize("is_normed", [False, True], ids=["", "batch norm"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch_dim", [None, "auto"])
def test_a_step_is_that_of_mtl_backward(form: str, batch_dim: Any, is_normed: bool) -> None:
    """Trunk and heads, over a series of steps with optimizers that would show another rate."""
    model = Tasks(is_normed=is_normed)
    twin = copy.deepcopy(model)
    engine = Engine(model.trunk, batch_dim=batch_dim)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, twin)]
    for step in range(6):
        x = batch(7 + step % 2, 4)
        with pytest.warns(CoupledObjectivesWarning) if _warns(form, batch_dim, step) else _quiet():
            engine.backward(FORMS[form](model.means(x)), UPGrad())
        step_of_torchjd(twin, x)
        assert_gradients_are_close(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close_to_reference(flat(model.parameters()), flat(twin.parameters()))


def _warns(form: str, batch_dim: Any, step: int) -> bool:
    """Whether the engine tells that a vector of losses has no samples."""
    return form == "tensor" and batch_dim == "auto" and step == 0


def _quiet() -> Any:
    """A block without a warning."""
    return nullcontext()


def flat(parameters: Iterable[Tensor]) -> Tensor:
    """All numbers of some tensors."""
    return torch.cat([p.detach().flatten() for p in parameters])


def numbers(weights: Any) -> Tensor:
    """Weights in the form of the losses, one by one."""
    return flat(weights.values() if isinstance(weights, dict) else list(weights))


def assert_outside_is(model: Tasks, twin: Tasks, x: Tensor, weights: Any, which: Which) -> None:
    """Assert that `.grad` of the heads is that of plain autograd on a twin, and clear both."""
    total = [loss.mean() for loss in twin.losses(twin.features(x))]
    if which == "weighted":
        total = [w * loss for w, loss in zip(weights, total, strict=True)]
    sum(total).backward()
    for ours, plain in zip(model.outside(), twin.outside(), strict=True):
        assert (ours.grad is None) == (plain.grad is None)
        if ours.grad is not None:
            assert_close_to_reference(ours.grad, plain.grad)
    model.zero_grad()
    twin.zero_grad()


@pytest.mark.parametrize("which", ["sum", "weighted"])
@pytest.mark.parametrize("form", FORMS)
def test_both_values(form: str, which: Which) -> None:
    model = Tasks()
    twin = copy.deepcopy(model)
    engine = Engine(model.trunk, batch_dim=None)
    for _ in range(5):  # the later ones by ordinary passes, where these are cheaper
        x = batch(6, 4)
        losses = FORMS[form](model.means(x))
        weights = engine.backward(losses, UPGrad(), gradients_outside=which)
        assert_outside_is(model, twin, x, numbers(weights), which)


@pytest.mark.parametrize("which", ["sum", "weighted"])
@pytest.mark.parametrize("batch_dim", [0, "auto", None])
def test_several_losses_for_each_sample(batch_dim: Any, which: Which) -> None:
    """The sum is over the samples, too."""
    model = Tasks()
    twin = copy.deepcopy(model)
    engine = Engine(model.trunk, batch_dim=batch_dim)
    for _ in range(4):
        x = batch(6, 4)
        losses = torch.stack(model.losses(model.features(x)), 1)  # (B, K)
        weights = engine.backward(losses, UPGrad(), gradients_outside=which)
        expected = torch.stack(twin.losses(twin.features(x)), 1)
        ones = torch.ones_like(expected)
        (expected * (ones if which == "sum" else weights)).sum().backward()
        heads = [flat([p.grad for p in m.outside() if p.grad is not None]) for m in (model, twin)]
        assert_close_to_reference(*heads)
        model.zero_grad()
        twin.zero_grad()


@pytest.mark.parametrize("which", ["sum", "weighted"])
@pytest.mark.parametrize("unseen", ["rows", "error"])
def test_where_ordinary_passes_are_refused(unseen: Any, which: Which) -> None:
    model = Tasks()
    twin = copy.deepcopy(model)
    engine = Engine(model.trunk, batch_dim=None, unseen=unseen, verify="always")
    for _ in range(4):
        x = batch(6, 4)
        weights = engine.backward(model.means(x), UPGrad(), gradients_outside=which)
        assert_outside_is(model, twin, x, weights, which)


@pytest.mark.parametrize("which", ["sum", "weighted"])
def test_micro_batches(which: Which) -> None:
    """The sum is that of all losses of the step."""
    model = Tasks()
    twin = copy.deepcopy(model)
    engine = Engine(model.trunk, batch_dim=None)
    for _ in range(3):
        xs = batch(9, 4).split(3)
        with engine.accumulate(UPGrad(), gradients_outside=which) as step:
            for x in xs:
                step.add(model.means(x))
        factors = step.weights if which == "weighted" else [[1.0] * 3] * 3
        for x, weights in zip(xs, factors, strict=True):
            sum(w * loss for w, loss in zip(weights, twin.means(x), strict=True)).backward()
        heads = [flat([p.grad for p in m.outside() if p.grad is not None]) for m in (model, twin)]
        assert_close_to_reference(*heads)
        model.zero_grad()
        twin.zero_grad()


@pytest.mark.cpu
@pytest.mark.parametrize("which", ["sum", "weighted"])
def test_a_gradient_scaler(which: Which) -> None:
    """The gradients have the scale once, and where the Gramian overflows, no part takes a step."""
    model = Tasks()
    twin = copy.deepcopy(model)
    engine = Engine(model.trunk, batch_dim=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    x = batch(6, 4)
    for _ in range(3):
        weights = engine.backward(model.means(x), UPGrad(), scaler=scaler, gradients_outside=which)
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / scaler.get_scale()
        assert_outside_is(model, twin, x, weights, which)
    factor = torch.tensor(1.0, requires_grad=True)
    losses = [loss * factor for loss in model.means(x)]
    losses[0].register_hook(lambda gradient: gradient * torch.inf)
    engine.backward(losses, UPGrad(), scaler=scaler, gradients_outside=which)
    assert not flat([p.grad for p in model.trunk.parameters()]).isfinite().any()
    assert not factor.grad.isfinite()


def test_other_hooks_and_a_part_of_the_model() -> None:
    """Modules that the engine's hooks leave out are outside of J, too."""
    model = Tasks()
    twin = copy.deepcopy(model)
    engine = Engine(model, batch_dim=None)
    for part in (model.both, *model.heads):
        engine.hooks.deactivate(module=part)
    for which in ("sum", "weighted", "sum"):
        x = batch(6, 4)
        weights = engine.backward(model.means(x), UPGrad(), gradients_outside=which)
        assert_outside_is(model, twin, x, weights, which)


def test_another_value() -> None:
    model = Tasks()
    engine = Engine(model.trunk)
    message = "`gradients_outside` is 'mean'.*Pass \"sum\".*gradient of the sum of the losses"
    with pytest.raises(InvalidOptionError, match=message):
        engine.backward(model.means(batch(3, 4)), UPGrad(), gradients_outside="mean")
    with pytest.raises(InvalidOptionError, match=message):
        engine.accumulate(UPGrad(), gradients_outside="mean")
    assert all(p.grad is None for p in model.parameters())
