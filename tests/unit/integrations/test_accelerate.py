"""Steps in the loop of an `Accelerator`, beside rows of plain autograd."""

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autogram import (
    Engine,
    InvalidLossesError,
    InvalidOperandError,
    InvalidOptionError,
    UnsupportedError,
)
from autogram.integrations.accelerate import Accelerated
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import batch, mlp
from tests.unit.integrations.weightings import mean, weighting

SCALE = 2.0**22


def data(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Batches, of which the last one is smaller."""
    sizes = [4] * (count - 1) + [3]
    return [(batch(size, 4), torch.randint(3, (size,))) for size in sizes]


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Those of a classifier, ``(B,)``."""
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_steps_are_those_of_plain_autograd(each: int, is_first: bool) -> None:
    """With accumulation, clipping, and the rest at the end of an epoch."""
    model = mlp(4, 3)
    twin = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=each)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    engine = Engine(model) if is_first else None
    batches = data()
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list will do
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    engine = engine or Engine(prepared)
    steps = Accelerated(engine, weighting, accelerator)
    found = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(prepared):
                found.append(steps.backward(losses_of(prepared, x, y)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    plain = torch.optim.SGD(twin.parameters(), lr=0.2, momentum=0.5)
    parameters = list(twin.parameters())
    sizes = []
    for _ in range(2):
        for start in range(0, len(batches), each):
            part = batches[start : start + each]
            x, y = (torch.cat(tensors) for tensors in zip(*part, strict=True))
            rows = reference_jacobian(losses_of(twin, x, y), parameters)
            gradient = weighting(rows @ rows.T) @ rows
            shares = gradient.split([p.numel() for p in parameters])
            for p, share in zip(parameters, shares, strict=True):
                p.grad = share.view_as(p).clone()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            plain.step()
            sizes += [None] * (len(part) - 1) + [[len(x) for x, _ in part]]
    assert [w and [len(x) for x in w] for w in found] == sizes
    for p, q in zip(model.parameters(), parameters, strict=True):
        assert (p - q).abs().max() < 1e-10


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_precisions(precision: str, each: int) -> None:
    """accelerate refuses float16 on a CPU, so that the scaler and autocast are given by hand."""
    torch.set_default_dtype(torch.float32)
    model, batches = mlp(4, 3), data()
    is_half = precision == "fp16"
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=each,
        mixed_precision="no" if is_half else precision,
    )
    if is_half:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = Accelerated(Engine(model), mean, accelerator)
    course, skipped, taken = [], 0, 0
    for _ in range(15):
        for x, y in loader:
            with accelerator.accumulate(model), accelerator.autocast():
                with torch.autocast("cpu", torch.float16, enabled=is_half):
                    losses = losses_of(model, x, y)
                weights = steps.backward(losses)
                optimizer.step()
                if weights is not None:
                    is_finite = all(bool(part.isfinite().all()) for part in weights)
                    assert is_finite != optimizer.step_was_skipped
                    skipped += not is_finite
                    taken += 1
                optimizer.zero_grad()
            course.append(float(losses.detach().mean()))
    assert sum(course[-5:]) < 0.9 * sum(course[:5])
    assert (skipped > 0) == is_half
    assert skipped < taken / 3
    if is_half:
        assert accelerator.scaler.get_scale() == SCALE / 2**skipped


def test_an_error_begins_a_step_anew() -> None:
    """What was taken in before is not in the next step."""
    model = mlp(4, 3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(model)
    steps = Accelerated(Engine(model), weighting, accelerator)
    batches = data(4)
    accelerator.gradient_state._set_sync_gradients(sync_gradients=False)
    steps.backward(losses_of(model, *batches[0]))
    with pytest.raises(InvalidLossesError):
        steps.backward(losses_of(model, *batches[1]).detach())
    accelerator.gradient_state._set_sync_gradients(sync_gradients=True)
    weights = steps.backward(losses_of(model, *batches[2]))
    assert weights is not None
    assert [len(x) for x in weights] == [4]


@pytest.mark.parametrize("which", ["sum", "weighted"])
@pytest.mark.parametrize("each", [1, 2])
def test_parameters_outside_of_the_engine(each: int, which: Any) -> None:
    model = mlp(4, 3)
    twin = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True)
    steps = Accelerated(Engine(model[0]), weighting, accelerator, gradients_outside=which)
    batches = data()[:each]
    for number, (x, y) in enumerate(batches, 1):
        accelerator.gradient_state._set_sync_gradients(number == each)
        weights = steps.backward(losses_of(model, x, y))
    losses = torch.cat([losses_of(twin, x, y) for x, y in batches])
    assert weights is not None
    (losses.sum() if which == "sum" else losses @ torch.cat(weights)).backward()
    for p, q in zip(model[2].parameters(), twin[2].parameters(), strict=True):
        assert_close_to_reference(p.grad, q.grad)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOptionError, match="`gradients_outside` is 'mean'"):
        Accelerated(Engine(mlp()), mean, Accelerator(cpu=True), gradients_outside="mean")
    accelerator = Accelerator(cpu=True)
    model: Any = mlp()
    with pytest.raises(InvalidOperandError, match="weighting is a Tensor"):
        Accelerated(Engine(model), torch.ones(3), accelerator)  # type: ignore[arg-type]
    monkeypatch.setattr(
        Accelerator, "distributed_type", property(lambda _: DistributedType.DEEPSPEED)
    )
    with pytest.raises(UnsupportedError, match=r"leaves backward passes to DEEPSPEED.*Use an"):
        Accelerated(Engine(model), weighting, accelerator)
