"""Whole models in half precision, under autocast, and with parameters of several types."""

import inspect

import peft
import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from tests.unit.engines import assert_as_rounded
from tests.unit.environment import DEVICE

from .adapters import GPT2_TARGETS, LOW_RANK, adapted
from .zoo import GPT2, SPECIMENS, Batch, Specimen

pytestmark = pytest.mark.slow

HALF = [torch.bfloat16, torch.float16]
SOME = ["gpt2", "mamba", "mixtral", "bert-two-tasks", "t5", "vit", "swin", "resnet", "gpt2-dora"]


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """A batch whose inputs are of a type; token indices stay as they are."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


def float_losses(specimen: Specimen, model: nn.Module, batch: Batch) -> Tensor:
    """Losses in float32, of a network in whatever type, and with parts in float32 if it has any."""
    return inspect.unwrap(specimen.compute_losses)(model, batch).float()


@pytest.mark.parametrize("name", SPECIMENS)
def test_models_under_autocast(name: str) -> None:
    """Parameters in float32, products in bfloat16."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1]).float()
    engine = Engine(model)
    batch = in_dtype(specimen.make_batch(specimen.sizes[1]), torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        losses = float_losses(specimen, model, batch)
    assert_as_rounded(engine, losses, model, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", SOME)
def test_models_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """All parameters in one type."""
    specimen = SPECIMENS[name]
    model = specimen.make_model(specimen.attentions[-1]).to(dtype)
    engine = Engine(model)
    batch = in_dtype(specimen.make_batch(specimen.sizes[1]), dtype)
    losses = float_losses(specimen, model, batch)
    assert_as_rounded(engine, losses, model, dtype)


def test_adapters_in_another_type() -> None:
    """peft keeps adapters in float32 beside a frozen model in bfloat16."""
    build = lambda attention: GPT2.build(attention).bfloat16()  # noqa: E731
    model = adapted(build, peft.LoraConfig(**GPT2_TARGETS, **LOW_RANK))("sdpa")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora" in name else torch.bfloat16)
        if "lora" in name:
            nn.init.normal_(parameter)
    engine = Engine(model)
    losses = float_losses(GPT2, model, GPT2.make_batch(4))
    assert_as_rounded(engine, losses, model, torch.bfloat16)
