"""Which sample each place belongs to, by zeros and by scales."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.owners import Owners, owners_by_scales, owners_by_zeros
from tests.unit.engines import batch

WIDTH = 4
METHODS = [owners_by_zeros, owners_by_scales]


def owners(find: Callable[..., Owners], of: Callable[[Tensor], Tensor], samples: int) -> Owners:
    """What is found for the result of one linear layer, from the losses `of` it."""
    layer = nn.Linear(WIDTH, 3)
    engine = Engine(layer)
    losses = of(layer(batch(samples, WIDTH)))
    return find(engine._channel, Objectives(losses, 0))


def the_only(found: Owners) -> dict[int, Tensor]:
    """The dimensions of the only use."""
    (dims,) = found.values()
    return dims


@pytest.mark.parametrize("find", METHODS)
@pytest.mark.parametrize("samples", [2, 3, 31, 32, 33, 64, 65])
def test_samples_in_order(find: Callable[..., Owners], samples: int) -> None:
    found = the_only(owners(find, lambda y: y.sin().sum(1), samples))
    assert torch.equal(found[0], torch.arange(samples))


@pytest.mark.parametrize("find", METHODS)
def test_samples_in_another_order(find: Callable[..., Owners]) -> None:
    """The place from which each loss is taken belongs to the sample of that loss."""
    order = torch.randperm(40)
    found = the_only(owners(find, lambda y: y.sin().sum(1)[order], 40))
    assert torch.equal(found[0][order], torch.arange(40))


@pytest.mark.parametrize("find", METHODS)
def test_places_without_a_cotangent(find: Callable[..., Owners]) -> None:
    found = the_only(owners(find, lambda y: y.sin().sum(1)[[4, 1]], 5))
    assert found[0].tolist() == [-1, 1, -1, -1, 0]


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "sums that cancel": lambda y: y.sum(1) - y.sum(1).mean(),
    "a small share of another": lambda y: y.sin().sum(1) + 1e-12 * y.sum(1).roll(1),
    "a double share of another": lambda y: y.sum(1) + 2 * y.sum(1).roll(-2),
    "shares of powers of two": lambda y: y.sum(1) + F.pad(2 * y.sum(1)[2:] - y.sum(1)[:-2], (0, 2)),
    "as much of another": lambda y: y.sum(1) + y.sum(1).roll(1),
    "all but its own": lambda y: y.sum() - y.sum(1),
    "opposites": lambda y: y.sum(1) - y.sum(1).flip(0),
}


@pytest.mark.parametrize("find", METHODS)
@pytest.mark.parametrize("samples", [4, 5, 8])
@pytest.mark.parametrize("name", COUPLED)
def test_places_of_several_samples(find: Callable[..., Owners], name: str, samples: int) -> None:
    assert 0 not in the_only(owners(find, COUPLED[name], samples))


@pytest.mark.parametrize("find", METHODS)
def test_objectives_of_a_sample_that_cancel(find: Callable[..., Owners]) -> None:
    """Probabilities add up to one, so that equal weights would see nothing."""
    layer = nn.Linear(WIDTH, 3)
    engine = Engine(layer)
    losses = layer(batch(5, WIDTH)).softmax(1)
    found = the_only(find(engine._channel, Objectives(losses, 0)))
    assert torch.equal(found[0], torch.arange(5))
