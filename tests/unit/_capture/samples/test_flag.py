"""Constants that are compared on the device, where the flag is read behind the pass."""

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._capture.samples.replays import Flag
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, batch, counted_passes, per_sample

ORDERS = [[0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 2, 0], [3, 1, 2, 0], [0, 1, 2, 3]]


@pytest.fixture(params=[True, False], ids=["at once", "behind the pass"])
def is_ready(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether flags are ready at once, as on a CPU, or not, as on a GPU."""
    monkeypatch.setattr(Flag, "is_ready", property(lambda _: request.param))
    return bool(request.param)


def losses_of(model: nn.Module, order: list[int]) -> Tensor:
    """Those of samples in some order."""
    return per_sample(model(batch(4, 3)))[torch.tensor(order)]


@pytest.mark.parametrize("verify", ["first", "never"])
def test_gramians_are_exact(is_ready: bool, verify: str) -> None:
    del is_ready
    model = nn.Linear(3, 2)
    engine = Engine(model, batch_dim=0, verify=verify)
    for order in ORDERS:
        assert_exact(engine, losses_of(model, order), model)


def test_gradients_of_the_fused_step_are_exact(is_ready: bool) -> None:
    """The graph is kept until it is known that the places were right."""
    del is_ready
    model = nn.Linear(3, 2)
    engine = Engine(model, batch_dim=0, verify="never")
    weights = torch.tensor([1.0, 2.0, -1.0, 0.5])
    for order in ORDERS:
        losses = losses_of(model, order)
        expected = torch.autograd.grad(losses, model.weight, weights, retain_graph=True)[0]
        model.weight.grad = None
        engine.backward(losses, lambda _: weights)
        assert_close_to_reference(model.weight.grad, expected)


def test_equal_constants_cost_no_pass(is_ready: bool) -> None:
    del is_ready
    model = nn.Linear(3, 2)
    engine = Engine(model, batch_dim=0, verify="never")
    engine.compute_gramian(losses_of(model, ORDERS[0]))
    losses = losses_of(model, ORDERS[0])
    with counted_passes(losses) as passes:
        engine.compute_gramian(losses)
    assert len(passes) == 1


PLACES = [[0, 2, 4, 6], [1, 2, 5, 6], [1, 2, 5, 6], [0, 4, 2, 6], [0, 4, 2, 6], [1, 5, 3, 6]]


def test_other_constants_cost_a_pass_where_the_flag_comes_late(is_ready: bool) -> None:
    """The places are inferred again, and the pass that was made with others is made again."""
    model = nn.Linear(3, 2)
    engine = Engine(model, batch_dim=0, verify="never")
    found = []
    for places in PLACES:
        losses = model(batch(4, 3)).tanh().flatten().index_select(0, torch.tensor(places))
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
        found.append(len(passes))
        assert_exact(engine, losses, model)
    assert found == ([1] * 6 if is_ready else [1, 2, 1, 2, 1, 2])


def test_any_of_several_flags() -> None:
    no, yes = torch.tensor(False), torch.tensor(True)
    assert not Flag([]).read()
    assert not Flag([no, no]).read()
    assert Flag([no, yes]).read()
