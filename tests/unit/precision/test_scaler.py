"""Steps with `torch.amp.GradScaler`: exact gradients of scaled losses, and steps that it skips."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, InvalidOperandError, InvalidOptionError, NonFiniteError
from autogram.testing import reference_jacobian
from autogram.weightings import GradVac, UPGrad
from tests.unit.checks import EVERY_KIND, Objectives, assert_close_to_reference, irregular
from tests.unit.engines import batch, mlp, per_sample
from tests.unit.environment import DEVICE

SCALE = 2.0**20

Step = Callable[[Engine, Any, Any, Any], Any]


def fused(engine: Engine, losses: Any, weighting: Any, scaler: Any) -> Any:
    """One pass."""
    return engine.backward(losses, weighting, scaler=scaler)


def two_passes(engine: Engine, losses: Any, weighting: Any, scaler: Any) -> Any:
    """Weights, and a backward pass of the user."""
    weights = engine.weights(losses, weighting, scaler=scaler)
    if isinstance(losses, Tensor):
        scaler.scale(losses).backward(weights)
    else:
        torch.autograd.backward(scaler.scale(values(losses)), values(weights))
    return weights


@pytest.fixture(params=[fused, two_passes], ids=lambda f: f.__name__)
def step(request: pytest.FixtureRequest) -> Step:
    """The backward pass of a step."""
    return request.param


def values(of: Any) -> list[Tensor]:
    """Those of a list or a dict."""
    return list(of.values() if isinstance(of, dict) else of)


def weighting(gramian: Tensor) -> Tensor:
    """Different for each objective, and dependent on the size of the Gramian."""
    assert gramian.isfinite().all(), "called at a step that is skipped"
    return gramian.diagonal().rsqrt() * torch.arange(1, len(gramian) + 1)


def scaler_of(scale: float = SCALE) -> torch.amp.GradScaler:
    """A scaler, whose scale only falls."""
    return torch.amp.GradScaler(DEVICE, init_scale=scale, growth_interval=10**6)


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Copies of them."""
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("overflows", [{0}, {2, 3}, {0, 1, 4}], ids=str)
def test_series_of_steps(step: Step, objectives: Objectives, overflows: set[int]) -> None:
    """Steps that overflow change nothing but the scale; the others are those of plain autograd.

    Sizes change on the way, and an overflow is where no samples are known, and where they are.
    """
    model = mlp(4, 3)
    engine = Engine(model, batch_dim=objectives.batch_dim)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), scaler_of()
    scale = SCALE
    for i, size in enumerate((4, 4, 4, 6, 6, 4)):
        x = batch(size, 4)
        if i in overflows:
            x[0, 0] = 1e300  # its square is infinite, and tanh' of it is zero: 0 * inf
        twin = copy.deepcopy(model)
        output = model(x)
        if i in overflows:
            output = output * torch.tensor([torch.inf, 1, 1])
        weights = step(engine, objectives.of(output), weighting, scaler)
        before = parameters_of(model)
        scaler.step(optimizer)
        scaler.update()
        if i in overflows:
            scale /= 2
            assert weights.isnan().all()
            assert all(map(torch.equal, parameters_of(model), before))
        else:
            losses = objectives.of(twin(x))
            rows = reference_jacobian(losses, twin.parameters())
            expected = weighting(rows @ rows.T)
            assert_close_to_reference(weights.flatten(), expected)
            found = torch.cat([p.grad.flatten() for p in model.parameters()])  # unscaled by now
            assert_close_to_reference(found, expected @ rows)
        assert scaler.get_scale() == scale
        optimizer.zero_grad()


@pytest.mark.parametrize("form", ["list", "dict", "per sample"])
def test_several_losses(step: Step, form: str) -> None:
    """Weights come back in the form of the losses, at a step that is skipped, too."""
    model = mlp(4, 3)
    engine = Engine(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of()
    for factor in (torch.inf, 1.0, torch.nan, 1.0):
        output = model(batch(4, 4)) * factor
        losses: Any = [output.square().mean(), output[:, 0].sin().mean()]
        if form == "dict":
            losses = dict(zip("ab", losses, strict=True))
        if form == "per sample":
            losses = {"a": output.square().sum(1), "b": output[:, :2].sin()}
        weights = step(engine, losses, weighting, scaler)
        assert type(weights) is type(losses)
        for w, loss in zip(values(weights), values(losses), strict=True):
            assert w.shape == loss.shape
            assert w.isfinite().all() == (factor == 1)
        before = parameters_of(model)
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, parameters_of(model), before)) == (factor != 1)
        optimizer.zero_grad()
    assert scaler.get_scale() == SCALE / 4


@pytest.mark.parametrize("first_scale", [2.0**8, 2.0**22], ids=["fits", "overflows"])
@pytest.mark.parametrize("verify", ["first", "always", "never"])
@pytest.mark.parametrize("each", [1, 2])
def test_training_in_half_precision(step: Step, first_scale: float, verify: Any, each: int) -> None:
    """A network that overflows because the scale is too large, and then trains."""
    model = mlp(6, 3).float()
    x = batch(8, 6).float()
    engine = Engine(model, verify=verify)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of(first_scale)
    course, skipped = [], 0
    for _ in range(30):
        with torch.autocast(DEVICE, dtype=torch.float16):
            output = model(x)
        losses = per_sample(output.float())
        if each == 2:
            losses = torch.stack([losses, output.float().square().sum(1)], 1)
        weights = step(engine, losses, lambda g: torch.ones(len(g), dtype=g.dtype) / len(g), scaler)
        skipped += not weights.isfinite().all()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        course.append(float(losses.detach().mean()))
    assert scaler.get_scale() == first_scale / 2**skipped
    assert (skipped > 0) == (first_scale > 2.0**8)
    assert course[-1] < 0.7 * course[skipped]
    assert all(p.isfinite().all() for p in model.parameters())


def test_gradients_of_the_same_weights_bit_for_bit() -> None:
    """The step in two passes beside a model without an engine."""
    model = mlp(6, 3).float()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    both = [(m, torch.optim.SGD(m.parameters(), 0.1), scaler_of(2.0**22)) for m in (model, twin)]
    for _ in range(16):
        x = batch(8, 6).float()
        weights = None
        for m, optimizer, scaler in both:
            with torch.autocast(DEVICE, dtype=torch.float16):
                losses = per_sample(m(x).float())
            if weights is None:
                weights = engine.weights(losses, lambda g: g.mean(0) / g.sum(), scaler=scaler)
            scaler.scale(losses).backward(weights)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert both[0][2].get_scale() == both[1][2].get_scale() < 2.0**22
    assert all(map(torch.equal, parameters_of(model), parameters_of(twin)))


def test_gramian_is_that_of_the_losses() -> None:
    """The scale is a power of two, so nothing but the scale is in between."""
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3)))
    expected = engine.compute_gramian(losses)
    _, gramian = engine.backward(losses, weighting, scaler=scaler_of(), return_gramian=True)
    assert_close_to_reference(gramian, expected)
    losses = per_sample(model(batch(4, 3))) * torch.inf
    _, gramian = engine.backward(losses, weighting, scaler=scaler_of(), return_gramian=True)
    assert gramian.shape == (4, 4)
    assert gramian.isnan().all()


def test_graph_is_kept_if_asked_for() -> None:
    """Of a step that is skipped, too."""
    model = mlp()
    engine = Engine(model)
    for factor in (torch.inf, 1.0):
        losses = per_sample(model(batch(4, 3))) * factor
        for _ in range(2):
            engine.backward(losses, weighting, scaler=scaler_of(), retain_graph=True)
        losses.sum().backward()


@pytest.mark.parametrize("first", [torch.inf, 1.0])
def test_parameters_outside_of_the_engine(first: float) -> None:
    """A head without an engine: its step is skipped, and taken, with the others."""
    model, head = mlp(), nn.Linear(2, 1)
    engine = Engine(model)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    scaler = scaler_of()
    for factor in (first, 1.0, torch.inf):
        losses = head(model(batch(4, 3))).square().squeeze(1) * factor
        engine.backward(losses, weighting, scaler=scaler)
        before = parameters_of(head)
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, parameters_of(head), before)) == (factor != 1)
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [UPGrad, GradVac])
def test_weightings_see_no_step_that_is_skipped(step: Step, make: Callable[[], Any]) -> None:
    """They would refuse its Gramian, or remember it."""
    model = mlp()
    twin = copy.deepcopy(model)
    engine, plain = Engine(model), Engine(twin)
    of_model, of_twin = make(), make()
    for factor in (torch.inf, 1.0, torch.nan, 1.0):
        x = batch(4, 3)
        weights = step(engine, per_sample(model(x)) * factor, of_model, scaler_of())
        if factor == 1:
            expected = plain.weights(per_sample(twin(x)), of_twin)
            assert_close_to_reference(weights, expected)


def test_errors_of_the_weighting_pass_through(step: Step) -> None:
    """Also one that a step is skipped for if it comes from the engine."""

    def failing(gramian: Tensor) -> Tensor:
        raise NonFiniteError(f"of the user, for {len(gramian)}")

    model = mlp()
    with pytest.raises(NonFiniteError, match="of the user, for 4"):
        step(Engine(model), per_sample(model(batch(4, 3))), failing, scaler_of())


@pytest.mark.filterwarnings("ignore::autogram.UnverifiedWarning")
def test_a_disabled_scaler_is_none(step: Step) -> None:
    """There is nobody then who would skip a step."""
    model = mlp()
    engine = Engine(model)
    scaler = torch.amp.GradScaler(DEVICE, enabled=False)
    losses = per_sample(model(batch(4, 3)))
    expected = engine.weights(losses, weighting)
    assert_close_to_reference(step(engine, losses, weighting, scaler), expected)
    with pytest.raises(NonFiniteError, match="infinite or not a number"):
        step(engine, per_sample(model(batch(5, 3))) * torch.inf, lambda g: g.mean(1), scaler)


def test_losses_that_the_user_has_scaled() -> None:
    """An overflow names the argument by which it would be a skipped step."""
    model = mlp()
    engine = Engine(model, verify="never")
    engine.compute_gramian(per_sample(model(batch(4, 3))))
    scaled = per_sample(model(batch(4, 3))) * 1e200
    with pytest.raises(
        NonFiniteError, match=r"`engine\.backward\(losses, weighting, scaler=scaler"
    ):
        engine.backward(scaled, UPGrad())


def test_what_is_no_scaler(step: Step) -> None:
    model = mlp()
    with pytest.raises(InvalidOptionError, match=r"is a float\. Pass the `torch\.amp\.GradScaler`"):
        step(Engine(model), per_sample(model(batch(4, 3))), weighting, 2.0)
    with pytest.raises(InvalidOptionError, match=r"is a type\. Pass the `torch\.amp\.GradScaler`"):
        step(Engine(model), per_sample(model(batch(4, 3))), weighting, torch.amp.GradScaler)


def test_the_warning_is_there_without_a_scaler() -> None:
    """It is left out for the thread's calls with one alone, and for as long as they run."""
    model = mlp()
    engine = Engine(model, verify="always")
    x = batch(4, 3)
    engine.backward(per_sample(model(x)), weighting, scaler=scaler_of())
    infinite = irregular(4) * torch.tensor([torch.inf, 1, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.backward(per_sample(model(x)) * infinite, weighting, scaler=scaler_of())
    with pytest.warns(UserWarning, match="cannot be verified"):
        engine.compute_gramian(per_sample(model(x)) * infinite)


def test_losses_of_no_objective() -> None:
    """An empty batch has no weights."""
    model = mlp()
    losses = per_sample(model(batch(0, 3)))
    assert Engine(model).weights(losses, weighting, scaler=scaler_of()).shape == (0,)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("overflows", [set(), {0}, {4}, {3, 8}], ids=str)
def test_accumulation(overflows: set[int], several: bool) -> None:
    """Of three micro-batches in each step: one that overflows skips the step of all."""
    model, head = mlp(4, 3), nn.Linear(3, 3)
    engine = Engine(model)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer, scaler = torch.optim.SGD(parameters, lr=1e-3), scaler_of()
    skipped = 0
    for i in range(4):
        batches = [3 * i + j for j in range(3)]
        twin, twin_head = copy.deepcopy(model), copy.deepcopy(head)
        rows = []
        with engine.accumulate(weighting, scaler=scaler, gradients_outside="weighted") as batch:
            for number in batches:
                x = batch_of(number)
                output = head(model(x)).square()
                losses: Any = output if several else output.sum(1)
                batch.add(losses * torch.inf if number in overflows else losses)
                expected = twin_head(twin(x)).square()
                expected = expected if several else expected.sum(1)
                both = [*twin.parameters(), *twin_head.parameters()]
                rows.append(reference_jacobian(expected, both))
        before = [p.detach().clone() for p in parameters]
        scaler.step(optimizer)
        scaler.update()
        jacobian = torch.cat(rows)
        inner = jacobian[:, : sum(p.numel() for p in model.parameters())]
        expected_gramian = inner @ inner.T
        assert batch.gramian.shape == expected_gramian.shape
        assert [len(weights) for weights in batch.weights] == [2, 3, 2]
        if overflows & set(batches):
            skipped += 1
            is_lost = torch.cat(
                [
                    torch.full((len(part),), number in overflows)
                    for number, part in zip(batches, rows, strict=True)
                ]
            )
            assert not batch.gramian[is_lost].isfinite().any()
            right = batch.gramian[~is_lost][:, ~is_lost]
            assert_close_to_reference(right, expected_gramian[~is_lost][:, ~is_lost])
            assert all(weights.isnan().all() for weights in batch.weights)
            assert all(map(torch.equal, before, parameters))
        else:
            assert_close_to_reference(batch.gramian, expected_gramian)
            weights = weighting(batch.gramian)
            assert_close_to_reference(torch.cat([w.flatten() for w in batch.weights]), weights)
            found = torch.cat([p.grad.flatten() for p in parameters])
            assert_close_to_reference(found, weights @ jacobian)
        optimizer.zero_grad()
        assert scaler.get_scale() == SCALE / 2**skipped
    assert skipped == len({number // 3 for number in overflows})


def batch_of(number: int) -> Tensor:
    """Inputs of one micro-batch, whose sizes differ."""
    return batch(3 if number % 3 == 1 else 2, 4)


def test_accumulation_that_an_error_ends() -> None:
    """Nothing is written, whatever has overflown before."""
    model = mlp(4, 3)
    engine = Engine(model)

    def take_step() -> None:
        with engine.accumulate(weighting, scaler=scaler_of()) as step:
            step.add(per_sample(model(batch(2, 4))) * torch.inf)
            raise KeyError

    with pytest.raises(KeyError):
        take_step()
    assert all(p.grad is None for p in model.parameters())


def test_accumulation_without_losses() -> None:
    """As without a scaler: no gradients, and none that are not a number."""
    model = mlp(4, 3)
    with Engine(model).accumulate(weighting, scaler=scaler_of()) as step:
        step.add(per_sample(model(batch(0, 4))))
    assert all(p.grad is None for p in model.parameters())


def test_a_scale_that_changes_between_micro_batches() -> None:
    """Inner products of rows with different factors would have neither factor."""
    model = mlp(4, 3)
    scaler = scaler_of()
    engine = Engine(model)

    def take_step() -> None:
        with engine.accumulate(weighting, scaler=scaler) as step:
            for number in range(2):
                step.add(per_sample(model(batch_of(number))))
                scaler.update(SCALE / 2)

    with pytest.raises(InvalidOperandError, match="scale has changed between the micro-batches"):
        take_step()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("place", range(3))
def test_several_optimizers_of_a_step_that_is_skipped(place: int) -> None:
    """Each looks at its own gradients, whichever micro-batch overflows and whichever it reaches."""
    trunk, heads = mlp(4, 4), [nn.Linear(4, 2) for _ in range(3)]
    outside = nn.Parameter(torch.tensor(1.5))
    engine = Engine(trunk, *heads)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (trunk, *heads)]
    optimizers.append(torch.optim.SGD([outside], lr=0.1))
    scaler = scaler_of()
    before = [p.detach().clone() for each in optimizers for p in each.param_groups[0]["params"]]
    with engine.accumulate(weighting, scaler=scaler) as step:
        for i, head in enumerate(heads):
            losses = per_sample(head(trunk(batch(2, 4)))) * outside
            step.add(losses * torch.inf if i == place else losses)
    is_lost = torch.arange(6) // 2 == place
    assert step.gramian.shape == (6, 6)
    assert not step.gramian[is_lost].isfinite().any()
    assert step.gramian[~is_lost][:, ~is_lost].isfinite().all()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    after = [p for each in optimizers for p in each.param_groups[0]["params"]]
    assert all(map(torch.equal, before, after))
    assert scaler.get_scale() == SCALE / 2
