"""Weights that cannot be multiplied into ``.grad``: each way to give them refuses them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autogram import Engine, InvalidOperandError, NonFiniteError, concatenate
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, features
from tests.unit.engines import batch, mlp, per_sample
from tests.unit.environment import DEVICE

Weighting = Callable[[Tensor], Tensor]
Writer = Callable[[Engine, Tensor, Weighting], Any]


def fused(engine: Engine, losses: Tensor, weighting: Weighting) -> Any:
    return engine.backward(losses, weighting)


def accumulated(engine: Engine, losses: Tensor, weighting: Weighting) -> Any:
    with engine.accumulate(weighting) as step:
        step.add(losses, retain_graph=True)
        step.add(losses)


def from_jacobian(engine: Engine, losses: Tensor, weighting: Weighting) -> Any:
    jacobian = engine.jacobian(losses)
    jacobian.accumulate_grad(weighting(jacobian.gramian()))


def from_several_jacobians(engine: Engine, losses: Tensor, weighting: Weighting) -> Any:
    jacobian = concatenate([engine.jacobian(losses), engine.jacobian(losses)])
    jacobian.accumulate_grad(weighting(jacobian.gramian()))


def alone(engine: Engine, losses: Tensor, weighting: Weighting) -> Any:
    return engine.weights(losses, weighting)


WRITERS: list[Writer] = [fused, accumulated, from_jacobian, from_several_jacobians]
writers = pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
every_call = pytest.mark.parametrize("write", [*WRITERS, alone], ids=lambda f: f.__name__)


def last_is(value: float) -> Weighting:
    """Ones, and another number for the last objective."""

    def weighting(gramian: Tensor) -> Tensor:
        weights = gramian.new_ones(len(gramian), dtype=torch.float64)
        weights[-1] = value
        return weights

    return weighting


NOT_FINITE = {
    "not a number": (last_is(torch.nan), torch.float64),
    "infinite": (last_is(torch.inf), torch.float64),
    "negative and infinite": (last_is(-torch.inf), torch.float64),
    "too large for the parameters": (last_is(1e300), torch.float32),
    "division by zero": (lambda gramian: (gramian * 0).mean(1) / 0, torch.float64),
}


def refused(
    engine: Engine, call: Callable[[], Any], match: str = "infinite or not a number"
) -> None:
    """Assert that a call refuses its weights. On a GPU, it does not wait for them itself."""

    def call_and_wait() -> None:
        call()
        engine.check_replays()

    with pytest.raises(NonFiniteError, match=match):
        call_and_wait()


@every_call
@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.parametrize("outputs", [1, 3])
def test_weights_that_are_not_finite(write: Writer, name: str, outputs: int) -> None:
    """Nothing changes in `.grad`, also of leaves that are not in J, and the next call is right."""
    weighting, dtype = NOT_FINITE[name]
    model, head = mlp(3, 2).to(dtype), nn.Linear(2, outputs).to(dtype)
    engine = Engine(model)
    leaves = [*model.parameters(), *head.parameters()]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)

    def losses() -> Tensor:
        return head(model(batch(4, 3).to(dtype))).square()

    for _ in range(3):
        refused(engine, lambda: write(engine, losses(), weighting))
        assert all(torch.equal(leaf.grad, torch.ones_like(leaf)) for leaf in leaves)
    for leaf in leaves:
        leaf.grad = None
    last, weights = losses(), torch.arange(1.0, 4 * outputs + 1, dtype=dtype)
    engine.jacobian(last).accumulate_grad(weights)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_close_to_reference(found, weights @ reference_jacobian(last, model.parameters()))


@writers
def test_a_series_with_a_step_that_is_refused(write: Writer) -> None:
    """Steps behind it are those of plain autograd."""
    model = mlp()
    engine = Engine(model)
    for number in range(7):
        losses = per_sample(model(batch(4, 3)))
        rows = reference_jacobian(losses, model.parameters())
        if number in (2, 3, 5):
            refused(engine, lambda losses=losses: write(engine, losses, last_is(torch.nan)))
            assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        else:
            write(engine, losses, lambda gramian: gramian.new_ones(len(gramian)))
            found = torch.cat([p.grad.flatten() for p in model.parameters()])
            times = 2 if write in (accumulated, from_several_jacobians) else 1
            assert_close_to_reference(found, times * rows.sum(0))
        model.zero_grad()


@pytest.mark.cpu
def test_the_message_names_objectives() -> None:
    """Those whose rows are not finite, if the Gramian has such, and else those of the weights."""
    model = mlp()
    engine = Engine(model, verify="never")
    engine.backward(per_sample(model(batch(6, 3))), lambda gramian: gramian.diagonal())
    model.zero_grad()
    factors = torch.tensor([1, 1, torch.nan, 1, torch.inf, 1])
    with pytest.raises(
        NonFiniteError, match=r"Gramian, in the rows of the objectives 2, 4: .*these losses"
    ):
        engine.backward(per_sample(model(batch(6, 3))) * factors, lambda gramian: gramian.mean(1))
    with pytest.raises(
        NonFiniteError, match=r"weights of the objectives 5 are .* Gramian is finite.*weighting"
    ):
        engine.backward(per_sample(model(batch(6, 3))), last_is(torch.nan))
    with pytest.raises(NonFiniteError, match=r"`accumulate_grad` got .* of the objectives 5"):
        engine.jacobian(per_sample(model(batch(6, 3)))).accumulate_grad(
            last_is(torch.nan)(torch.eye(6))
        )


@pytest.mark.parametrize("write", [fused, accumulated, alone], ids=lambda f: f.__name__)
def test_with_a_scaler_too_where_nothing_has_overflown(write: Writer) -> None:
    """A smaller scale would not help, so that the scaler would skip each step."""
    model = mlp()
    engine = Engine(model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)

    class Scaled:
        """The engine with the scaler."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args: getattr(engine, name)(*args, scaler=scaler)

    losses = per_sample(model(batch(4, 3)))
    with pytest.raises(NonFiniteError, match=r"weights of the objectives \d are"):
        write(Scaled(), losses, last_is(torch.nan))  # type: ignore[arg-type]
    assert all(p.grad is None for p in model.parameters())


def in_no_memory(form: str) -> Weighting:
    """Weights without values."""
    if form == "meta":
        return lambda gramian: torch.ones(len(gramian), device="meta")
    return lambda gramian: FakeTensorMode().from_tensor(torch.ones(len(gramian)))


@every_call
@pytest.mark.parametrize("form", ["meta", "fake"])
def test_weights_without_values(write: Writer, form: str) -> None:
    """Errors of torch did not say where they came from."""
    model = mlp()
    engine = Engine(model)
    what = "on the device `meta`" if form == "meta" else "a fake tensor"
    with pytest.raises(InvalidOperandError, match=rf"vector .* is {what}.*no values.*Pass"):
        write(engine, per_sample(model(batch(4, 3))), in_no_memory(form))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("form", ["meta", "fake"])
def test_other_arguments_without_values(form: str) -> None:
    """Vectors, directions, residuals and Gramians."""
    model = mlp()
    jacobian = Engine(model).jacobian(per_sample(model(batch(4, 3))))
    weights = in_no_memory(form)(torch.eye(4))
    direction = in_no_memory(form)(model[0].bias)
    for call in (jacobian.vjp, jacobian.least_squares, lambda w: jacobian.vjp(torch.stack([w, w]))):
        with pytest.raises(InvalidOperandError, match=r"no values.*Pass"):
            call(weights)
    with pytest.raises(InvalidOperandError, match=r"entry `0\.bias` .*no values.*Pass"):
        jacobian.jvp({"0.bias": direction})


@every_call
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_eight_bits(write: Writer, dtype: torch.dtype) -> None:
    """They are widened, as those in half precision are."""
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3)))

    def weighting(gramian: Tensor) -> Tensor:
        return (torch.arange(len(gramian), device=gramian.device) % 3).to(gramian.dtype).to(dtype)

    found = write(engine, losses, weighting)
    if write is alone:
        assert found.tolist() == [0, 1, 2, 0]
    else:
        assert all(p.grad.any() for p in model.parameters())


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_weights_of_quantized_numbers() -> None:
    model = mlp()
    engine = Engine(model)
    with pytest.raises(InvalidOperandError, match=r"A vector of dtype torch\.qint8.*real"):
        engine.backward(
            per_sample(model(batch(4, 3))),
            lambda gramian: torch.quantize_per_tensor(
                torch.ones(len(gramian), dtype=torch.float32), 0.1, 0, torch.qint8
            ),
        )


def test_objectives_of_one_sample() -> None:
    """`batch_dim=None`, several losses in a dict."""
    model = mlp()
    engine = Engine(model)
    y = features(model(batch(4, 3)), 2)
    losses = {"a": y[:, 0].sum(), "b": y[:, 1].sum()}
    refused(engine, lambda: engine.backward(losses, last_is(torch.nan)))
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
