"""Tensors that have a shape and no values, and numbers that PyTorch cannot add up."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from autogram import Engine, InvalidLossesError, InvalidOperandError, UnsupportedError
from autogram.monitor import ConflictMonitor, cosines
from autogram.plot import by_cluster, plot_norms
from autogram.testing import reference_jacobian
from autogram.weightings import GradVac, PCGrad, UPGrad
from tests.unit.engines import assert_exact, batch, mlp, per_sample


def accumulate(engine: Engine, losses: Any) -> None:
    with engine.accumulate(torch.diagonal) as step:
        step.add(losses)


CALLS: dict[str, Callable[[Engine, Any], Any]] = {
    "gramian": lambda engine, losses: engine.compute_gramian(losses),
    "jacobian": lambda engine, losses: engine.jacobian(losses),
    "backward": lambda engine, losses: engine.backward(losses, torch.diagonal),
    "accumulate": accumulate,
    "clip": lambda engine, losses: engine.clip(losses, 1.0),
    "weights": lambda engine, losses: engine.weights(losses, torch.diagonal),
    "sketch": lambda engine, losses: engine.sketch(losses, 4),
    "verify": lambda engine, losses: engine.verify(losses),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
@pytest.mark.parametrize("batch_dim", ["auto", None])
def test_a_model_on_meta(name: str, batch_dim: Any) -> None:
    model = mlp().to("meta")
    engine = Engine(model, batch_dim=batch_dim)
    losses = per_sample(model(torch.randn(4, 3, device="meta")))
    match = r"shape \(4,\) are on the device `meta`.*no values.*real device.*to_empty"
    with pytest.raises(InvalidLossesError, match=match):
        CALLS[name](engine, losses)
    with pytest.raises(InvalidLossesError, match="on the device `meta`"):
        CALLS[name](engine, [losses.sum(), losses.sum()])
    model.to_empty(device=torch.get_default_device())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    assert_exact(Engine(model), per_sample(model(batch(4, 3))), model)


@every_call
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("is_real", ["nothing", "the model", "the losses"])
def test_fake_tensors(name: str, is_inside: bool, is_real: str) -> None:
    """Losses that are fake, and real ones where a mode makes all new tensors fake."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(is_on: bool) -> AbstractContextManager[Any]:
        return mode if is_on else nullcontext()

    with fake(is_real == "nothing"):
        model = mlp()
        engine = Engine(model)
    with fake(is_real != "the losses"):
        losses = per_sample(model(batch(4, 3)))
    is_inside = is_inside or is_real == "the losses"
    with fake(is_inside), pytest.raises(InvalidLossesError, match=r"fake tensor|`FakeTensorMode`"):
        CALLS[name](engine, losses)


@every_call
def test_a_parameter_on_meta_that_no_loss_reaches(name: str) -> None:
    """A layer that is not there yet, and is skipped."""
    model = nn.ModuleList([mlp(), nn.Linear(3, 3, device="meta")])
    engine = Engine(model)
    CALLS[name](engine, per_sample(model[0](batch(4, 3))))


@pytest.mark.parametrize(
    "read",
    [UPGrad(), PCGrad(), GradVac(), ConflictMonitor().observe, cosines, by_cluster, plot_norms],
)
def test_gramians_without_values(read: Callable[[Any], Any]) -> None:
    with pytest.raises(
        InvalidOperandError, match=r"Gramian is on the device `meta`.*Pass a result"
    ):
        read(torch.eye(3, device="meta"))
    with pytest.raises(InvalidOperandError, match=r"Gramian is a fake tensor.*no values"):
        read(FakeTensorMode().from_tensor(torch.eye(3)))


class EightBits(nn.Module):
    """A weight in float8, cast where it is used, beside others."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3).to(dtype))
        self.bias = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias).tanh()


every_dtype = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])


def write_by_jacobian(engine: Engine, losses: Any) -> None:
    engine.jacobian(losses).accumulate_grad(torch.ones(len(losses)))


WRITERS = {"backward": CALLS["backward"], "accumulate": accumulate, "jacobian": write_by_jacobian}
writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@every_dtype
@every_call
def test_parameters_in_eight_bits(name: str, dtype: torch.dtype) -> None:
    model = EightBits(dtype)
    engine = Engine(model)
    for _ in range(3):
        CALLS[name](engine, per_sample(model(batch(4, 3))))
        model.zero_grad()
    losses = per_sample(model(batch(4, 3)))
    rows = torch.stack(
        [
            torch.cat([g.to(loss.dtype).flatten() for g in gradients])
            for loss in losses
            for gradients in [torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)]
        ]
    )
    gramian = engine.compute_gramian(losses)  # autograd rounds each entry of a row to eight bits
    torch.testing.assert_close(gramian, (rows @ rows.T).to(gramian), rtol=0.3, atol=0.3)


@every_dtype
@writers
def test_gradients_in_eight_bits_that_would_be_added_up(write: Any, dtype: torch.dtype) -> None:
    """PyTorch adds no numbers in float8: a backward pass of its own fails, too."""
    model = EightBits(dtype)
    engine = Engine(model)
    write(engine, per_sample(model(batch(4, 3))))
    before = [p.grad.clone() for p in model.parameters()]
    match = r"`weight` has a gradient in torch\.float8.*Set it to `None`.*`parameter\.grad_dtype"
    with pytest.raises(UnsupportedError, match=match):
        write(engine, per_sample(model(batch(4, 3))))
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad.float(), gradient.float())
    model.zero_grad()
    write(engine, per_sample(model(batch(4, 3))))


@every_dtype
@writers
def test_leaves_in_eight_bits_that_are_not_in_the_jacobian(write: Any, dtype: torch.dtype) -> None:
    model, head = mlp(3, 3), EightBits(dtype)
    engine = Engine(model)
    for _ in range(2):
        write(engine, per_sample(head(model(batch(4, 3)))))
        model.zero_grad()
        if write is write_by_jacobian:
            continue  # writes gradients of J alone
        with pytest.raises(UnsupportedError, match=r"shape \(2, 3\) has a gradient in torch\.flo"):
            write(engine, per_sample(head(model(batch(4, 3)))))
        assert all(p.grad is None for p in model.parameters())
        head.zero_grad()


@every_dtype
@writers
def test_gradients_of_parameters_in_eight_bits_may_be_wider(write: Any, dtype: torch.dtype) -> None:
    """By ``grad_dtype``, as with plain autograd."""
    model = EightBits(dtype)
    model.weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
    engine = Engine(model)
    for _ in range(3):
        write(engine, per_sample(model(batch(4, 3))))
    assert model.weight.grad.dtype == torch.float32


@every_dtype
def test_losses_in_eight_bits(dtype: torch.dtype) -> None:
    model = mlp()
    engine = Engine(model)
    for name, call in CALLS.items():
        losses = per_sample(model(batch(4, 3))).to(dtype)
        with pytest.raises(InvalidLossesError, match=r"dtype torch\.float8.*`\.float\(\)`"):
            call(engine, losses)
        assert name


def activations(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.tanh().to(torch.float8_e4m3fn).to(x.dtype), weight.to(x.dtype))


HARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two casts": lambda x, weight: F.linear(x, weight.to(torch.bfloat16).to(x.dtype)),
    "twice": lambda x, weight: F.linear(x, weight.to(x.dtype)) @ weight.to(x.dtype),
    "rows of it": lambda x, weight: F.linear(x, weight[:2].to(x.dtype)),
    "looked up": lambda x, weight: weight[torch.arange(len(x)) % 2].to(x.dtype) * x,
    "embedded": lambda x, weight: F.embedding(torch.arange(len(x)) % 2, weight).to(x.dtype) * x,
    "a penalty": lambda x, weight: F.linear(x, weight.to(x.dtype)) + weight.to(x.dtype).sum(),
    "activations": activations,
}


class Used(EightBits):
    """The weight in float8, used in another way."""

    def __init__(self, use: str) -> None:
        super().__init__(torch.float8_e4m3fn)
        self.use = HARD[use]
        self.first = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.first(x).tanh(), self.weight)


@pytest.mark.parametrize("batch_dim", [0, None])
@pytest.mark.parametrize("use", HARD)
def test_uses_in_eight_bits(use: str, batch_dim: Any) -> None:
    """Each call is right, or an error says that PyTorch has no numbers to compute with."""
    model = Used(use)
    engine = Engine(model, batch_dim=batch_dim)
    wide = Used(use)
    wide.load_state_dict(model.state_dict())
    wide.weight = nn.Parameter(model.weight.detach().to(torch.get_default_dtype()))
    for _ in range(3):
        x = batch(4, 3)
        for name, call in CALLS.items():
            if name == "clip" and batch_dim is None:
                continue  # which has no samples to clip
            model.zero_grad()
            try:
                found = call(engine, per_sample(model(x)))
            except UnsupportedError as error:
                assert re.search(r"in float8 has gradients.*wider dtype", str(error))  # noqa: PT017
                continue
            if call is CALLS["gramian"]:
                rows = reference_jacobian(per_sample(wide(x)), wide.parameters())
                expected = rows @ rows.T
                error = float((found - expected).abs().max() / expected.abs().max())
                assert error < 0.1  # float8 has three bits behind the first one
