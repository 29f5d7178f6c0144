"""The fused step: its gradients are those of a weighted backward pass."""

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchjd.aggregation import MGDAWeighting, UPGradWeighting

from autogram import Engine, InvalidOperandError
from tests.unit.alive import live_bytes
from tests.unit.checks import (
    COUPLED,
    EVERY_KIND,
    PER_SAMPLE,
    SEVERAL,
    ModelFactory,
    Objectives,
    assert_close_to_reference,
    irregular,
)
from tests.unit.engines import batch, counted_passes, mlp, per_sample
from tests.unit.jacobian.test_jacobian import LANGUAGE, MODELS
from tests.unit.jacobians import assert_gradients_are_close


def weighting(gramian: Tensor) -> Tensor:
    """Weights that depend on all of the Gramian, in no symmetric way."""
    places = torch.arange(1.0, len(gramian) + 1, dtype=gramian.dtype)
    return (gramian / gramian.diagonal().mean()) @ places.sin()


def assert_step_is_exact(
    model: nn.Module,
    x: Tensor,
    objectives: Objectives = PER_SAMPLE,
    steps: int = 3,
    **options: int,
) -> None:
    """Assert that several steps add up the same gradients as a twin without the fused step."""
    twin = copy.deepcopy(model)
    engine = Engine(model, batch_dim=objectives.batch_dim, **options)
    other = Engine(twin, batch_dim=objectives.batch_dim)
    for step in range(steps):  # the first search for samples, and some free the graph
        inputs = x + step if x.is_floating_point() else (x + step) % 6
        weights = engine.backward(objectives.of(model(inputs)), weighting)
        losses = objectives.of(twin(inputs))
        expected = weighting(other.compute_gramian(losses))
        losses.backward(expected.view(losses.shape))
        assert_close_to_reference(weights.flatten(), expected)
    assert_gradients_are_close(model, twin)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("make_model", MODELS)
def test_gradients_are_exact(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_step_is_exact(make_model(), torch.randn(3, 4, 4), objectives)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("make_model", LANGUAGE)
def test_gradients_of_lookups_are_exact(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_step_is_exact(make_model(), torch.randint(6, (3, 4)), objectives)


@pytest.mark.parametrize("limit", [2**14, 2**18, 2**30])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_rows_of_convolutions(limit: int, memory_format: torch.memory_format) -> None:
    """They are kept as products leave them, as far as there is room, and factors where not."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 48, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(48, 8, (1, 3)),
        nn.ReLU(),
        nn.Flatten(),
    ).to(memory_format=memory_format)
    x = torch.randn(9, 3, 8, 8).to(memory_format=memory_format)
    assert_step_is_exact(model, x, memory_limit_bytes=limit)


class Surrounded(nn.Module):
    """A trunk with parameters of others behind it, in front of it, and inside."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.trunk, self.after = nn.Linear(3, 4), mlp(4, 4), nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.after(self.trunk(self.before(x))))


@pytest.mark.parametrize("objectives", [PER_SAMPLE, SEVERAL, COUPLED], ids=repr)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_leaves_outside_of_the_engine(objectives: Objectives, retain_graph: bool) -> None:
    """Heads, what is in front, inputs, and a parameter in the losses get ordinary gradients."""
    model = Surrounded()
    twin = copy.deepcopy(model)
    model.temperature, twin.temperature = (nn.Parameter(torch.tensor(0.7)) for _ in range(2))
    engine = Engine(model.trunk, batch_dim=objectives.batch_dim)
    x, y = (torch.ones(4, 3).cumsum(0).requires_grad_() for _ in range(2))
    for _ in range(3):
        losses = objectives.of(model(x)) * model.temperature
        weights, gramian = engine.backward(
            losses,
            weighting,
            gradients_outside="weighted",
            retain_graph=retain_graph,
            return_gramian=True,
        )
        assert weights.shape == losses.shape
        assert_close_to_reference(weights.flatten(), weighting(gramian))
        expected = objectives.of(twin(y)) * twin.temperature
        expected.backward(weights)
        if retain_graph:
            losses.sum().backward()
            expected = objectives.of(twin(y)) * twin.temperature
            expected.sum().backward()
    assert_gradients_are_close(model, twin)
    assert_close_to_reference(x.grad, y.grad)


def test_heads_need_no_second_pass_through_the_trunk() -> None:
    """The trunk's activations have one backward pass, with heads of others behind it."""
    trunk, head = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2)
    engine = Engine(trunk, verify="never")
    passes = []
    for _ in range(3):
        hidden = trunk[1](trunk[0](batch(5, 3)))
        hidden.register_hook(lambda _: passes.append("trunk"))
        losses = per_sample(head(trunk[2](hidden).tanh()))
        passes.clear()
        engine.backward(losses, weighting)
    assert passes == ["trunk"]
    assert head.weight.grad is not None


def test_a_second_engine_on_the_model_costs_no_pass() -> None:
    """What it puts into the graph is no leaf of the user's, which would need a pass of its own."""
    model = mlp()
    engines = [Engine(model, verify="never"), Engine(model, verify="never")]
    for engine in engines * 4:
        losses = per_sample(model(batch(4, 3)))
        with counted_passes(losses) as passes:
            engine.backward(losses, weighting)
    assert len(passes) == 1


def test_graph_is_freed_on_the_way() -> None:
    """Once the samples' places are known, as by an ordinary backward pass."""
    model = mlp()
    engine = Engine(model, verify="never")
    for _ in range(3):
        losses = per_sample(model(batch(4, 3)))
        engine.backward(losses, weighting)
    with pytest.raises(RuntimeError, match="second time"):
        losses.sum().backward()


def test_memory_of_activations_is_freed_on_the_way() -> None:
    saved: list[weakref.ref[Tensor]] = []

    def pack(x: Tensor) -> Tensor:
        copied = x.clone()
        saved.append(weakref.ref(copied))
        return copied

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    engine = Engine(model, verify="never")
    for _ in range(3):
        x = batch(4, 3)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            losses = per_sample(model(x))
        engine.backward(losses, weighting)
    alive = sum(each() is not None for each in saved)
    assert alive <= 2, "more than what the first layer's call keeps"
    assert losses.requires_grad


@pytest.mark.parametrize("make_weighting", [UPGradWeighting, MGDAWeighting])
def test_weightings_of_torchjd(make_weighting) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    x = batch(4, 3)
    engine, other = Engine(model), Engine(twin)
    weights = engine.backward(per_sample(model(x)), make_weighting())
    losses = per_sample(twin(x))
    expected = make_weighting()(other.compute_gramian(losses))
    losses.backward(expected)
    assert_close_to_reference(weights, expected)
    assert_gradients_are_close(model, twin)


def test_weighting_runs_with_gradients_enabled() -> None:
    """It may optimise something of its own."""
    model = mlp()
    scale = torch.ones(4, requires_grad=True)
    seen = []

    def learned(gramian: Tensor) -> Tensor:
        (scale @ gramian @ scale).backward()
        seen.append(scale.grad)
        return scale * 2

    engine = Engine(model)
    weights = engine.backward(per_sample(model(batch(4, 3))), learned)
    assert not weights.requires_grad
    assert seen[0] is not None


def test_a_weighting_that_changes_the_gramian() -> None:
    """It would change what the engine returns."""
    model = mlp()
    engine = Engine(model)
    with pytest.raises(InvalidOperandError, match="weighting changed its Gramian in place"):
        engine.backward(per_sample(model(batch(4, 3))), lambda gramian: gramian.div_(2).sum(1))
    engine.backward(per_sample(model(batch(4, 3))), lambda gramian: gramian.clone().div_(2).sum(1))


def positions_model() -> nn.Module:
    """A layer whose rows are formed: more positions than columns."""
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def test_gradients_of_earlier_steps_stay() -> None:
    model = positions_model()
    engine = Engine(model)
    found = []

    for _ in range(4):
        engine.backward(per_sample(model(torch.randn(6, 20, 4))), weighting)
        gradients = [p.grad for p in model.parameters()]
        found.append((gradients, copy.deepcopy(gradients)))
        model.zero_grad(set_to_none=True)

    for gradients, copies in found:
        assert all(map(torch.equal, gradients, copies))


@pytest.mark.cpu
def test_a_removed_engine_lets_go_of_its_memory() -> None:
    model = positions_model()
    engine = Engine(model)
    for _ in range(2):
        engine.backward(per_sample(model(torch.randn(6, 20, 4))), weighting)
    model.zero_grad()
    kept = live_bytes()

    engine.remove()

    assert live_bytes() < kept


def test_a_step_inside_of_a_weighting() -> None:
    model = positions_model()
    twin = copy.deepcopy(model)
    engine, other = Engine(model), Engine(twin)
    x, y = torch.randn(6, 20, 4), torch.randn(6, 20, 4)

    for _ in range(3):  # the first steps find out how much memory is needed
        losses, inner = per_sample(model(x)), per_sample(model(y))

        def nested(gramian: Tensor, inner: Tensor = inner) -> Tensor:
            engine.backward(inner, weighting)
            return weighting(gramian)

        engine.backward(losses, nested)
        for z in (y, x):
            expected = per_sample(twin(z))
            expected.backward(weighting(other.compute_gramian(expected)))

    assert_gradients_are_close(model, twin)


def test_weights_of_another_shape() -> None:
    model = mlp()
    engine = Engine(model)
    with pytest.raises(InvalidOperandError, match="A vector of shape"):
        engine.backward(per_sample(model(batch(4, 3))), lambda gramian: gramian[:2])


def test_weights_of_the_shape_of_the_losses() -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    x, w = batch(4, 3), batch(4, 2)
    engine.backward(model(x), lambda _: w)
    twin(x).backward(w)
    assert_gradients_are_close(model, twin)


def test_no_objectives() -> None:
    model = mlp()
    engine = Engine(model)
    weights, gramian = engine.backward(
        per_sample(model(batch(0, 3))), weighting, return_gramian=True
    )
    assert weights.shape == (0,)
    assert gramian.shape == (0, 0)


def test_penalty_and_method_in_the_tail() -> None:
    """Parameters that the losses reach past every tap."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def forward(self, x: Tensor) -> Tensor:
            output = self.model(x)
            penalty = sum(p.square().sum() for p in self.model.parameters())
            return output + penalty * x[:, :1]

    model = Penalised()
    twin = copy.deepcopy(model)
    engine, other = Engine(model.model), Engine(twin.model)
    x = batch(4, 3)
    for _ in range(3):
        engine.backward(per_sample(model(x)), weighting)
        losses = per_sample(twin(x))
        losses.backward(weighting(other.compute_gramian(losses)))
    assert_gradients_are_close(model, twin)


def test_training_follows_the_two_passes() -> None:
    """Ten steps of Adam with weight decay, a part that has no gradient, and changing shapes."""
    model = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(2, 2)})
    twin = copy.deepcopy(model)
    engine, other = Engine(model), Engine(twin)
    optimizers = [torch.optim.AdamW(each.parameters(), weight_decay=0.1) for each in (model, twin)]
    for step in range(10):
        x = batch(4 + step % 2, 3)
        engine.backward(F.softplus(per_sample(model["used"](x))), weighting)
        losses = F.softplus(per_sample(twin["used"](x)))
        losses.backward(weighting(other.compute_gramian(losses)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close_to_reference(ours.detach(), theirs.detach())


def test_optimizers_in_the_backward_pass() -> None:
    """A hook that takes the step of a parameter disturbs no other, inside of J or beside it."""
    model = Surrounded()
    twin = copy.deepcopy(model)
    engine = Engine(model.trunk)
    x, weights = torch.randn(3, 3), torch.tensor([0.3, -1.0, 2.0])

    def take_step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(take_step)
    for _ in range(3):
        losses = PER_SAMPLE.of(model(x))
        engine.backward(losses, lambda _: weights, gradients_outside="weighted")
        PER_SAMPLE.of(twin(x)).backward(weights)
        for parameter in twin.parameters():
            if parameter.grad is not None:
                take_step(parameter)
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close_to_reference(found.detach(), expected.detach())


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="needs a newer PyTorch")
@pytest.mark.parametrize("call", ["backward", "accumulate", "accumulate_grad"])
def test_gradients_of_another_dtype(call: str) -> None:
    """Parameters in bfloat16 whose gradients are kept in float32, and not rounded before."""
    model = mlp().to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    engine, weights = Engine(model), irregular(4).to(torch.float32)
    x = batch(4, 3).to(torch.bfloat16)
    expected = engine.jacobian(per_sample(model(x).float())).vjp(weights)
    for step in range(1, 3):
        losses = per_sample(model(x).float())
        if call == "backward":
            engine.backward(losses, lambda _: weights)
        elif call == "accumulate":
            with engine.accumulate(lambda _: weights) as micro_batches:
                micro_batches.add(losses)
        else:
            engine.jacobian(losses).accumulate_grad(weights)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            torch.testing.assert_close(parameter.grad, step * expected[name])
