"""Rules of the affine part of normalisations."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

from autogram import CoupledObjectivesWarning, Engine, MixedSamplesError
from autogram.testing import reference_jacobian
from tests.unit._blocks.blocks import Operators
from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SCALAR,
    UNCOUPLED,
    ModelFactory,
    Objectives,
    assert_close_to_reference,
    assert_gramian_is_exact,
    trainable,
)
from tests.unit.networks import call, trained
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact


def evaluated(module: nn.Module) -> nn.Module:
    """A normalisation as after training, with running statistics, in evaluation mode."""
    trained(module)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + ("var" in name))
    return module.eval()


def zeroed(module: nn.Module) -> nn.Module:
    """A normalisation whose weight is zero in one place."""
    trained(module)
    with torch.no_grad():
        module.weight[0] = 0
    return module


CASES = [
    pytest.param(lambda: trained(nn.LayerNorm(4)), (3, 4), id="layer"),
    pytest.param(lambda: trained(nn.LayerNorm(4)), (3, 5, 4), id="layer, positions"),
    pytest.param(lambda: trained(nn.LayerNorm((5, 4))), (3, 5, 4), id="layer, two dimensions"),
    pytest.param(
        lambda: trained(nn.LayerNorm((5, 4))), (3, 2, 5, 4), id="layer, positions of tables"
    ),
    pytest.param(lambda: trained(nn.LayerNorm(4, bias=False)), (3, 5, 4), id="layer without bias"),
    pytest.param(lambda: zeroed(nn.LayerNorm(4)), (3, 5, 4), id="layer, a weight is zero"),
    pytest.param(lambda: trained(nn.LayerNorm(4, eps=0.5)), (3, 4), id="layer, large eps"),
    pytest.param(
        call(lambda x, c: F.layer_norm(x, (4,), bias=c), (4,)), (3, 4), id="layer without weight"
    ),
    pytest.param(
        call(lambda x, w: F.layer_norm(x.transpose(0, 1), (4,), w).transpose(0, 1), (4,)),
        (3, 5, 4),
        id="layer, sequence first",
    ),
    pytest.param(lambda: trained(nn.RMSNorm(4)), (3, 4), id="rms"),
    pytest.param(lambda: trained(nn.RMSNorm(4, eps=0.1)), (3, 5, 4), id="rms, positions and eps"),
    pytest.param(lambda: trained(nn.RMSNorm((5, 4))), (3, 5, 4), id="rms, two dimensions"),
    pytest.param(lambda: zeroed(nn.RMSNorm(4)), (3, 4), id="rms, a weight is zero"),
    pytest.param(lambda: trained(nn.GroupNorm(2, 4)), (3, 4, 5), id="group"),
    pytest.param(lambda: trained(nn.GroupNorm(4, 4)), (3, 4, 5, 2), id="group of one channel"),
    pytest.param(lambda: trained(nn.GroupNorm(1, 4)), (3, 4, 5), id="one group"),
    pytest.param(lambda: trained(nn.GroupNorm(2, 4)), (3, 4), id="group without positions"),
    pytest.param(lambda: trained(nn.GroupNorm(1, 3)), (3, 3, 3), id="group, all sizes equal"),
    pytest.param(lambda: zeroed(nn.GroupNorm(2, 4)), (3, 4, 5), id="group, a weight is zero"),
    pytest.param(
        call(lambda x, w: F.group_norm(x, 2, w), (4,)), (3, 4, 5), id="group without bias"
    ),
    pytest.param(
        # In PyTorch 2.13, its backward pass crashes where the input requires no gradient.
        call(
            lambda x, a, w, c: F.group_norm((a * x).to(memory_format=torch.channels_last), 2, w, c),
            *((4, 1, 1), (4,), (4,)),
        ),
        (3, 4, 5, 2),
        id="group, channels last",
    ),
    pytest.param(lambda: trained(nn.InstanceNorm1d(4, affine=True)), (3, 4, 5), id="instance 1d"),
    pytest.param(
        lambda: trained(nn.InstanceNorm2d(4, affine=True)), (3, 4, 5, 2), id="instance 2d"
    ),
    pytest.param(
        lambda: trained(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
        (3, 4, 5),
        id="instance with statistics, training",
    ),
    pytest.param(
        lambda: evaluated(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
        (3, 4, 5),
        id="instance with statistics, evaluation",
    ),
    pytest.param(
        lambda: zeroed(nn.InstanceNorm1d(4, affine=True)), (3, 4, 5), id="instance, zero weight"
    ),
    pytest.param(lambda: evaluated(nn.BatchNorm1d(4)), (3, 4), id="batch 1d"),
    pytest.param(lambda: evaluated(nn.BatchNorm1d(4)), (3, 4, 5), id="batch 1d, positions"),
    pytest.param(lambda: evaluated(nn.BatchNorm2d(4, eps=0.1)), (3, 4, 5, 2), id="batch 2d"),
    pytest.param(lambda: evaluated(nn.BatchNorm3d(2)), (3, 2, 2, 2, 2), id="batch 3d"),
    pytest.param(lambda: evaluated(nn.BatchNorm1d(3)), (3, 3, 3), id="batch, all sizes equal"),
    pytest.param(lambda: zeroed(nn.BatchNorm1d(4)).eval(), (3, 4), id="batch, a weight is zero"),
]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_gramian_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    assert_rule_is_exact(make_model, torch.randn(shape), wrap, objectives)


MIXING = [
    pytest.param(lambda: nn.BatchNorm1d(4), id="training"),
    pytest.param(
        lambda: nn.BatchNorm1d(4, track_running_stats=False), id="training, no statistics"
    ),
    pytest.param(
        lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(), id="evaluation, none"
    ),
]


def between_layers(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), trained(norm), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("objectives", [COUPLED, UNCOUPLED, SCALAR], ids=repr)
@pytest.mark.parametrize("make_norm", MIXING)
def test_statistics_of_the_batch_coupled(make_norm: ModelFactory, objectives: Objectives) -> None:
    x = torch.randn(5, 3)
    assert_gramian_is_exact(lambda: between_layers(make_norm()), x, objectives=objectives)


@pytest.mark.parametrize("make_norm", MIXING)
def test_statistics_of_the_batch_are_found(make_norm: ModelFactory) -> None:
    """A warning is right here: the losses of samples depend on each other's inputs."""
    model = between_layers(make_norm())
    engine = Engine(model)
    losses = PER_SAMPLE.of(model(torch.randn(5, 3)))
    with pytest.warns(CoupledObjectivesWarning, match=r"`linear` with `0\.weight`"):
        gramian = engine.compute_gramian(losses)
    jacobian = reference_jacobian(losses, trainable(model))
    assert_close_to_reference(gramian, jacobian @ jacobian.T)


@pytest.mark.parametrize("make_norm", MIXING)
def test_statistics_of_the_batch_are_refused(make_norm: ModelFactory) -> None:
    model = between_layers(make_norm())
    engine = Engine(model, batch_dim=0)
    losses = PER_SAMPLE.of(model(torch.randn(5, 3)))
    with pytest.raises(MixedSamplesError, match=r"`linear` with `0\.weight`"):
        engine.compute_gramian(losses)


def test_statistics_that_change_before_the_gramian() -> None:
    """A forward pass in training mode in between does not reach the recorded one.

    It does reach PyTorch's own backward pass, which a verification would find to differ.
    """
    model = evaluated(nn.BatchNorm1d(4))
    engine = Engine(model, verify="never")
    losses = PER_SAMPLE.of(model(torch.randn(3, 4)))
    jacobian = reference_jacobian(losses, trainable(model))
    model.train()(torch.randn(5, 4))
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


@pytest.mark.parametrize("name", ["group_norm", "instance_norm", "batch_norm"])
def test_a_single_value_for_each_channel(name: str) -> None:
    """Functions of `torch` take it, where those of `F` and modules refuse it."""

    def normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if name == "group_norm":
            return torch.group_norm(x, 2, weight, bias)
        function = getattr(torch, name)
        return function(x, weight, bias, None, None, True, 0.1, 1e-5, False)

    assert_gramian_is_exact(call(normalize, (2,), (2,)), torch.randn(1, 2, 1))


@pytest.mark.parametrize("shape", [(5, 4, 6), (5, 4, 3, 2), (5, 4)], ids=str)
def test_group_norm_keeps_what_the_graph_keeps(shape: tuple[int, ...]) -> None:
    """Its statistics are not computed again, unless hooks pack what the graph keeps."""
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Tanh(), nn.GroupNorm(4, 4))
    trained(model)
    engine = Engine(model, batch_dim=0, verify="never")
    ways: list[Callable[[], AbstractContextManager[Any]]] = [nullcontext, save_on_cpu]
    for i in (0, 1, 0, 0, 1, 1, 0):
        x = torch.randn(shape) + 3
        with ways[i]():
            losses = model(x).sin().flatten(1).sum(1)
        rows = reference_jacobian(losses, model.parameters())
        with Operators() as operators:
            gramian = engine.compute_gramian(losses)
        assert_close_to_reference(gramian, rows @ rows.T)
        assert operators.names.count("aten::native_group_norm") == 2 * i


def test_group_norm_of_half_precision_keeps_the_input() -> None:
    """The statistics that the call keeps are rounded then, without autocast."""
    model, half = nn.GroupNorm(2, 4), torch.bfloat16
    model.bias.requires_grad_(False)
    engine = Engine(model.to(half), batch_dim=0, verify="never")
    wide = copy.deepcopy(model).double()
    for _ in range(3):
        x = (20 + torch.randn(5, 4, 60)).to(half)
        factors = torch.randn(4, 60).to(half).double()
        losses, of_wide = (factors * y.double() for y in (model(x), wide(x.double())))
        rows = reference_jacobian(of_wide.sum((1, 2)), [wide.weight])
        gramian = engine.compute_gramian(losses.sum((1, 2))).double()
        error = float((gramian - rows @ rows.T).norm() / (rows @ rows.T).norm())
        assert error < 0.1 * torch.finfo(half).eps
