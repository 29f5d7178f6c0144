"""Gradient accumulation: many micro-batches, one Gramian, one set of weights."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import ChangedTensorError, Engine, InvalidLossesError, InvalidOperandError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, irregular, trainable
from tests.unit.jacobian.test_jacobian import Language
from tests.unit.jacobians import assert_gradients_are_close


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    """One loss for each sample."""
    return model(x).flatten(1).square().sum(1)


def weigh(gramian: Tensor) -> Tensor:
    """Weights that depend on every entry of the Gramian."""
    scaled = gramian / gramian.diagonal().max()
    return (scaled + scaled.cos()).mean(1)


def whole_step(model: nn.Module, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The same step by explicit rows, which leaves its gradients in ``.grad``."""
    losses = [losses_of(model, x) for x in batches]
    rows = torch.cat([reference_jacobian(x, trainable(model)) for x in losses])
    weights = weigh(rows @ rows.T)
    torch.cat([losses_of(model, x) for x in batches]).backward(weights)
    return rows @ rows.T, weights


@pytest.mark.parametrize("keep", ["auto", "factors", "rows"])
@pytest.mark.parametrize("make", [network, Language], ids=["dense", "tied"])
def test_a_series_of_steps(make, keep: str) -> None:
    """Micro-batches whose number and size change from step to step, with an optimizer."""
    model = make()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    optimizers = [torch.optim.SGD(x.parameters(), 1e-3, 0.9) for x in (model, twin)]
    for sizes in ((3, 3), (3, 2, 1), (5,), (2, 2, 2, 2), (3, 3)):
        if make is Language:
            batches = [torch.randint(0, 7, (n, 2 + n % 3)) for n in sizes]
        else:
            batches = [torch.randn(n, 4) for n in sizes]
        with engine.accumulate(weigh, keep=keep) as batch:
            for x in batches:
                batch.add(losses_of(model, x))
        gramian, weights = whole_step(twin, batches)
        assert_close_to_reference(batch.gramian, gramian)
        assert [tuple(w.shape) for w in batch.weights] == [(n,) for n in sizes]
        assert_close_to_reference(torch.cat(batch.weights), weights)
        assert_gradients_are_close(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_leaves_that_are_no_part_of_j() -> None:
    """A temperature outside of the engine gets its gradient, too, and keeps the graph till then."""
    model, temperature = network(), nn.Parameter(torch.tensor(0.7))
    twin, other = copy.deepcopy(model), copy.deepcopy(temperature)
    engine = Engine(model)
    batches = [torch.randn(n, 4) for n in (3, 2)]
    with engine.accumulate(weigh, gradients_outside="weighted") as batch:
        batch.add(losses_of(model, batches[0]) * temperature)
        batch.add(losses_of(model, batches[1]))
    losses = [losses_of(twin, batches[0]) * other, losses_of(twin, batches[1])]
    torch.cat(losses).backward(torch.cat(batch.weights))
    assert_close_to_reference(temperature.grad, other.grad)
    assert_gradients_are_close(model, twin)


def test_forms_of_losses() -> None:
    """Each call may have losses of its own form, and gets weights of this form."""
    model = network()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    x, y, z = (torch.randn(n, 4) for n in (3, 2, 4))
    with engine.accumulate(weigh) as batch:
        batch.add(model(x))
        batch.add({"mean": model(y)[:, 0], "rest": model(y)[:, 1:]}, retain_graph=True)
        batch.add([model(z)[:, 1], model(z)[:, 2].exp()])
    first, second, third = batch.weights
    assert first.shape == (3, 3)
    assert {key: tuple(w.shape) for key, w in second.items()} == {"mean": (2,), "rest": (2, 2)}
    assert [tuple(w.shape) for w in third] == [(4,), (4,)]
    twin(x).backward(first)
    twin(y)[:, 0].backward(second["mean"])
    twin(y)[:, 1:].backward(second["rest"])
    twin(z)[:, 1].backward(third[0])
    twin(z)[:, 2].exp().backward(third[1])
    assert_gradients_are_close(model, twin)


def test_hooks_on_parameters_run_once() -> None:
    model = network()
    engine = Engine(model)
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with engine.accumulate(weigh) as batch:
        for x in torch.randn(6, 4).split(2):
            batch.add(losses_of(model, x))
    assert len(seen) == 1
    assert torch.equal(seen[0], model[0].weight.grad)


def test_graphs_go_with_their_losses() -> None:
    """Between micro-batches, activations that are no factor of a row are freed."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten())
    engine = Engine(model)
    engine.backward(losses_of(model, torch.randn(3, 4)), weigh)  # the samples are known
    gc.collect()
    gc.disable()
    try:
        alive = []
        with engine.accumulate(weigh) as batch:
            for x in torch.randn(9, 4).split(3):
                y = model(x)
                alive.append(weakref.ref(y))
                batch.add(y.square().sum(1))
                del y
            assert [reference() for reference in alive] == [None] * 3
    finally:
        gc.enable()


def test_nothing_is_written_where_an_error_is_raised() -> None:
    model = network()
    engine = Engine(model)
    batch = engine.accumulate(weigh)
    x = torch.randn(3, 4)
    with pytest.raises(ZeroDivisionError), batch:
        batch.add(losses_of(model, x) * (1 / len(x[3:])))
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(InvalidOperandError, match="after its `with` block"):
        _ = batch.weights
    with pytest.raises(ChangedTensorError), engine.accumulate(weigh) as it:  # noqa: PT012
        it.add(losses_of(model, x))
        x.zero_()  # the end of the block raises
    with engine.accumulate(weigh) as batch:
        batch.add(losses_of(model, torch.randn(3, 4)))
    assert batch.gramian.shape == (3, 3)


def test_micro_batches_without_a_sample() -> None:
    model = network()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    x = torch.randn(3, 4)
    with engine.accumulate(weigh) as batch:
        batch.add(losses_of(model, x[:0]))
        batch.add(losses_of(model, x))
    assert [tuple(w.shape) for w in batch.weights] == [(0,), (3,)]
    whole_step(twin, [x])
    assert_gradients_are_close(model, twin)
    with engine.accumulate(weigh) as batch:
        batch.add(losses_of(model, x[:0]))
    with pytest.raises(InvalidOperandError, match="after its `with` block"):
        _ = batch.gramian


def test_micro_batches_without_a_sample_may_be_on_another_device() -> None:
    """They have no part in the step, whose Gramian is where the losses are."""
    model = network()
    x = torch.randn(3, 4)
    nothing = torch.zeros(0, device="meta", requires_grad=True)
    with Engine(model).accumulate(weigh) as batch:
        batch.add(nothing)
        batch.add(losses_of(model, x))
        batch.add(nothing)
    assert_close_to_reference(batch.gramian, whole_step(copy.deepcopy(model), [x])[0])


def test_misuse() -> None:
    model = network()
    engine = Engine(model)
    batch = engine.accumulate(weigh)
    losses = losses_of(model, torch.randn(3, 4))
    with pytest.raises(InvalidOperandError, match="added outside the block"):
        batch.add(losses)
    with batch, pytest.raises(InvalidOperandError, match="entered a second time"):
        batch.__enter__()
    with pytest.raises(InvalidOperandError, match="entered a second time"), batch:
        pass
    with pytest.raises(InvalidOperandError, match="The weighting is a Tensor"):
        engine.accumulate(irregular(3))
    with pytest.raises(InvalidLossesError, match="do not require"), engine.accumulate(weigh) as it:
        it.add(losses.detach())
    with (
        pytest.raises(InvalidOperandError, match="vector of shape"),
        engine.accumulate(lambda gramian: gramian) as it,
    ):
        it.add(losses)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_losses_that_are_single_numbers() -> None:
    """As gradient accumulation of means over micro-batches has them."""
    model = network()
    twin = copy.deepcopy(model)
    engine = Engine(model, batch_dim=None)
    batches = [torch.randn(n, 4) for n in (3, 2)]
    with engine.accumulate(weigh) as batch:
        for x in batches:
            batch.add(losses_of(model, x).mean())
    assert [tuple(w.shape) for w in batch.weights] == [(), ()]
    losses = torch.stack([losses_of(twin, x).mean() for x in batches])
    rows = reference_jacobian(losses, trainable(twin))
    assert_close_to_reference(batch.gramian, rows @ rows.T)
    losses.backward(weigh(rows @ rows.T))
    assert_gradients_are_close(model, twin)


@pytest.mark.parametrize("verify", ["always", "never"])
def test_a_leaf_outside_that_is_frozen_on_the_way(verify: Any) -> None:
    """It gets no gradient, as in a backward pass."""
    model, temperature = network(), nn.Parameter(torch.tensor(0.7))
    engine = Engine(model, verify=verify)
    with engine.accumulate(weigh) as batch:
        batch.add(losses_of(model, torch.randn(3, 4)) * temperature)
        temperature.requires_grad_(False)
        batch.add(losses_of(model, torch.randn(2, 4)))
    assert temperature.grad is None
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("limit", [2**29, 1])
def test_losses_over_no_sample(limit: int) -> None:
    """Losses of a micro-batch without a sample have rows of zeros, wherever parameters are used."""
    model = nn.Sequential(Language(), nn.utils.parametrizations.weight_norm(nn.Linear(7, 2)))
    twin = copy.deepcopy(model)
    engine = Engine(model, memory_limit_bytes=limit)
    for sizes in ((2, 0), (0, 3), (0, 1, 0)):
        batches = [torch.randint(0, 7, (n, 3)) for n in sizes]
        with engine.accumulate(weigh) as batch:
            for x in batches:
                batch.add(losses_of(model, x).sum())
        losses = torch.stack([losses_of(twin, x).sum() for x in batches])
        rows = reference_jacobian(losses, trainable(twin))
        assert_close_to_reference(batch.gramian, rows @ rows.T)
        for x, row in zip(batches, rows, strict=True):
            sketch = engine.sketch(losses_of(model, x).sum(), 16)
            assert sketch.rows.any() == row.any()
