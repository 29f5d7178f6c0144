"""Clipped steps: each sample's gradient counts with a norm of at most a bound."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import (
    CoupledObjectivesWarning,
    Engine,
    InvalidBatchDimError,
    InvalidLossesError,
    InvalidOperandError,
    MixedSamplesError,
    NonFiniteError,
    UnsupportedError,
)
from tests.unit.checks import (
    PER_SAMPLE,
    ModelFactory,
    assert_close_to_reference,
    in_real,
)
from tests.unit.engines import batch, counted_passes, mlp, per_sample
from tests.unit.jacobian.test_jacobian import LANGUAGE, MODELS
from tests.unit.jacobians import assert_gradients_are_close


def layer(name: str) -> str:
    """The module of a parameter."""
    return name.rpartition(".")[0]


def clip_plainly(
    model: nn.Module, losses: Tensor, bounds: Mapping[str, float], group_of: Mapping[str, str]
) -> dict[str, Tensor]:
    """Adds clipped gradients to ``.grad`` by autograd alone, and returns their norms before."""
    found: dict[str, Tensor] = {}
    for group, bound in bounds.items():
        named = model.named_parameters()
        some = [p for name, p in named if p.requires_grad and group_of[name] == group]
        norms = []
        for loss in losses:
            rows = torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
            squares = [in_real(x.to_dense()).square().sum() for x in rows if x is not None]
            norms.append(torch.stack(squares).sum().sqrt())
        found[group] = torch.stack(norms)
        losses.backward(bound / found[group].clamp(min=bound), inputs=some, retain_graph=True)
    return found


def assert_clips(
    make_model: ModelFactory, inputs: list[Tensor], *, is_by_group: bool = False, **options: Any
) -> None:
    """Assert that a series of steps adds up clipped gradients, and returns norms."""
    model = make_model()
    twin = copy.deepcopy(model)
    engine = Engine(model, **options)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    group_of = {name: str(i % 2) if is_by_group else "0" for i, name in enumerate(names)}
    bounds = {group: 0.7 + float(group) for group in dict.fromkeys(group_of.values())}
    for x in inputs:
        expected = clip_plainly(twin, PER_SAMPLE.of(twin(x)), bounds, group_of)
        losses = PER_SAMPLE.of(model(x))
        if is_by_group:
            found = engine.clip(losses, bounds, group_of.__getitem__)
        else:
            found = {"0": engine.clip(losses, bounds["0"])}
        assert list(found) == list(expected)
        for group, norms in found.items():
            assert_close_to_reference(norms, expected[group])
    assert_gradients_are_close(model, twin)


@pytest.mark.parametrize("is_by_group", [False, True])
@pytest.mark.parametrize("make_model", MODELS)
def test_sums_are_exact(make_model: ModelFactory, is_by_group: bool) -> None:
    """In a series of steps, with other numbers of samples."""
    inputs = [torch.randn(size, 4, 4) for size in (3, 3, 5, 1, 3)]
    assert_clips(make_model, inputs, is_by_group=is_by_group)


@pytest.mark.parametrize("is_by_group", [False, True])
@pytest.mark.parametrize("make_model", LANGUAGE)
def test_sums_of_lookups_are_exact(make_model: ModelFactory, is_by_group: bool) -> None:
    inputs = [torch.randint(6, (size, 4)) for size in (3, 2, 3)]
    assert_clips(make_model, inputs, is_by_group=is_by_group)


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize("limit", [1, 200])
def test_other_options(limit: int, verify: str) -> None:
    inputs = [torch.randn(size, 3) for size in (4, 4, 4, 2)]
    assert_clips(mlp, inputs, batch_dim=0, memory_limit_bytes=limit, verify=verify)


@pytest.mark.parametrize("bound", [1e-3, 0.5])
def test_a_sample_counts_with_the_bound_at_most(bound: float) -> None:
    """With and without it, also if its own loss is huge, the sums differ by the bound at most."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    sums, x = [], batch(5, 3) * torch.tensor([1.0, 1, 1, 1, 1e3]).unsqueeze(1)
    for samples in (slice(0, 5), slice(0, 4)):
        engine.clip(per_sample(model(x[samples])), bound)
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    difference = float((sums[0] - sums[1]).norm())
    assert bound * (1 - 1e-9) < difference < bound * (1 + 1e-9)


def test_a_step_is_one_pass() -> None:
    model = mlp()
    engine = Engine(model, batch_dim=0, verify="never")
    engine.clip(per_sample(model(batch(4, 3))), 1.0)
    losses = per_sample(model(batch(4, 3)))
    with counted_passes(losses) as passes:
        engine.clip(losses, 1.0)
    assert len(passes) == 1


def test_micro_batches_add_up() -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    x = batch(6, 3)
    for part in x.split(2):
        Engine(model, batch_dim=0).clip(per_sample(model(part)), 0.3)
    Engine(twin, batch_dim=0).clip(per_sample(twin(x)), torch.tensor(0.3))
    assert_gradients_are_close(model, twin)


def test_a_batch_without_samples() -> None:
    """As Poisson sampling may draw one."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    assert engine.clip(per_sample(model(batch(0, 3))), 1.0).shape == (0,)
    by_layer = engine.clip(per_sample(model(batch(0, 3))), {"0": 1.0, "2": 2.0}, layer)
    assert [*by_layer] == ["0", "2"]
    assert by_layer["2"].shape == (0,)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_gradients_that_are_zero() -> None:
    """A norm of zero divides nothing."""
    model = mlp()
    norms = Engine(model).clip(per_sample(model(batch(4, 3))) * 0, 1.0)
    assert norms.tolist() == [0.0] * 4
    assert not any(p.grad.any() for p in model.parameters())


def test_a_graph_that_is_kept() -> None:
    model = mlp()
    engine = Engine(model, verify="never")
    for _ in range(3):
        losses = per_sample(model(batch(4, 3)))
        engine.clip(losses, 1.0, retain_graph=True)
        engine.clip(losses, 1.0)


def refused(model: nn.Module, kind: type[Exception], message: str) -> Any:
    """A block that has to raise an error and write nothing."""

    class Refused:
        def __enter__(self) -> None:
            self.context = pytest.raises(kind, match=message)
            self.context.__enter__()

        def __exit__(self, *error: Any) -> bool:
            assert all(p.grad is None for p in model.parameters())
            return bool(self.context.__exit__(*error))

    return Refused()


BOUNDS: list[Any] = [0.0, -1.0, torch.inf, torch.nan, True, "1", None, torch.ones(2), [1.0]]


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
@pytest.mark.parametrize("is_by_group", [False, True])
def test_bounds_that_are_none(bound: Any, is_by_group: bool) -> None:
    model = mlp()
    losses = per_sample(model(batch(4, 3)))
    with refused(model, InvalidOperandError, r"A bound of norms is .*\. Pass a positive number"):
        if is_by_group:
            Engine(model).clip(losses, {"0": 1.0, "2": bound}, layer)
        else:
            Engine(model).clip(losses, bound)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"0": 1.0}, r"The dict of bounds does not fit .*: it lacks `2`\. Pass an entry for each"),
        ({"0": 1.0, "1": 1.0, "2": 1.0}, r"does not fit .*: it has `1`\."),
        (1.0, r"but only one bound\. Pass a dict with a bound for each group"),
    ],
    ids=["lacks", "has", "one"],
)
def test_bounds_that_do_not_fit_the_groups(bounds: Any, message: str) -> None:
    model = mlp()
    engine = Engine(model)
    with refused(model, InvalidOperandError, message):
        engine.clip(per_sample(model(batch(4, 3))), bounds, layer)


@pytest.mark.parametrize("batch_dim", [0, "auto"])
def test_several_losses_of_a_sample(batch_dim: Any) -> None:
    """Clipped one by one, a sample would count several times. Their sum is clipped instead."""
    model = mlp()
    engine = Engine(model, batch_dim=batch_dim)
    message = (
        r"shape \(4, 2\): 2 for each of 4 samples\. Clipped one by one, .*`losses\.flatten\(1\)"
    )
    losses = model(batch(4, 3)).square()
    with refused(model, InvalidLossesError, message):
        engine.clip(losses, 1.0)
    engine.clip(losses.flatten(1).sum(1), 1.0)


def test_the_samples_lie_in_another_dimension() -> None:
    model = mlp()
    engine = Engine(model, batch_dim=1)
    losses = per_sample(model(batch(4, 3)))
    with refused(model, InvalidLossesError, r"shape \(2, 4\): 2 for each of 4 samples"):
        engine.clip(torch.stack([losses, losses]), 1.0)
    assert engine.clip(losses.unsqueeze(0), 1.0).shape == (4,)


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_a_loss_of_the_whole_batch() -> None:
    model = mlp()
    with refused(model, InvalidLossesError, r"one number.*Keep one loss for each sample"):
        Engine(model, batch_dim=0).clip(per_sample(model(batch(4, 3))).mean(), 1.0)


def test_an_engine_that_tells_no_samples_apart() -> None:
    model = mlp()
    with refused(model, InvalidBatchDimError, r"`batch_dim` is None.*Pass `batch_dim=0`"):
        Engine(model, batch_dim=None).clip(per_sample(model(batch(4, 3))), 1.0)


@pytest.mark.parametrize("batch_dim", [0, "auto"])
def test_samples_that_meet(batch_dim: Any) -> None:
    """In each step, whatever the engine would do for a Gramian."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    engine = Engine(model, batch_dim=batch_dim)
    message = "The samples meet, as in BatchNorm" if batch_dim == "auto" else "The samples are mix"
    for step in range(3):
        warns = batch_dim == "auto" and step == 0
        with refused(model, MixedSamplesError, message):
            if warns:
                with pytest.warns(CoupledObjectivesWarning):
                    engine.clip(per_sample(model(batch(4, 3))), 1.0)
            else:
                engine.clip(per_sample(model(batch(4, 3))), 1.0)
    model.eval()
    engine.clip(per_sample(model(batch(4, 3))), 1.0)


@pytest.mark.parametrize("what", ["head", "input", "inactive"])
def test_leaves_that_are_no_part_of_the_jacobian(what: str) -> None:
    """Their gradients would not be clipped."""
    model, head, x = mlp(), nn.Linear(2, 2), batch(4, 3)
    engine = Engine(model, batch_dim=0)
    head.requires_grad_(what == "head")
    x.requires_grad_(what == "input")
    if what == "inactive":
        engine.hooks.deactivate(module=model[2])
    message = r"leaves that require a gradient and are not among .*Pass the modules .*`Engine`, too"
    both = nn.ModuleList([model, head])
    for _ in range(2):
        with refused(both, UnsupportedError, message):
            engine.clip(per_sample(head(model(x))), 1.0)
    head.requires_grad_(False)
    model[2].requires_grad_(what != "inactive")
    engine.clip(per_sample(head(model(x.detach()))), 1.0)


@pytest.mark.parametrize("is_by_group", [False, True])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_norms_that_are_not_finite(value: float, is_by_group: bool) -> None:
    model = mlp()
    engine = Engine(model, batch_dim=0, verify="never")
    engine.clip(per_sample(model(batch(4, 3))), 1.0)  # the samples are known from now on
    model.zero_grad()
    scale = torch.tensor([1.0, value, 1.0, 1.0])
    losses = per_sample(model(batch(4, 3))) * scale
    message = r"gradients of the samples 1 have norms that are infinite or not a number, and noth"
    with refused(model, NonFiniteError, message):
        if is_by_group:
            engine.clip(losses, {"0": 1.0, "2": 1.0}, layer)
        else:
            engine.clip(losses, 1.0)


def test_a_parameter_that_is_frozen() -> None:
    """It has no part in the norms."""
    model = mlp()
    model[0].requires_grad_(False)
    twin, x = copy.deepcopy(model), batch(4, 3)
    losses = per_sample(twin(x))
    bounds, group_of = {"all": 0.1}, dict.fromkeys(dict(twin.named_parameters()), "all")
    expected = clip_plainly(twin, losses, bounds, group_of)
    norms = Engine(model).clip(per_sample(model(x)), 0.1)
    assert_close_to_reference(norms, expected["all"])
    assert_gradients_are_close(model, twin)
