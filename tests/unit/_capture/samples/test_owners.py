"""Which sample each place belongs to, by zeros and by scales."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.owners import (
    Owners,
    Scales,
    _Zeros,
    owners_by_zeros,
    show_uses,
)
from autogram._capture.samples.proofs.spots import Spot, spots_of, ways_to_taps
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use
from tests.unit.engines import batch

WIDTH = 4


def by_zeros(channel: Channel, objectives: Objectives) -> dict[Use, Owners]:
    """The owners of all uses, by passes for parts of the samples."""
    survey = Survey(channel, objectives.losses)
    looked_at = spots_of(survey, ways_to_taps(survey))
    return owners_by_zeros(objectives, survey, looked_at)[0]


def by_scales(channel: Channel, objectives: Objectives) -> dict[Use, Owners]:
    """The owners of all uses, by passes with scaled samples, and one with equal ones."""
    scales, found = Scales(channel, objectives), dict[Use, Owners]()

    def see(use: Use, cotangent: Tensor) -> None:
        found[use] = scales.owners(use, cotangent)

    show_uses(channel, objectives, torch.ones(objectives.samples), see)
    return found


Find = Callable[[Channel, Objectives], dict[Use, Owners]]
METHODS = [by_zeros, by_scales]


def owners(find: Find, of: Callable[[Tensor], Tensor], samples: int) -> dict[Use, Owners]:
    """What is found for the result of one linear layer, from the losses `of` it."""
    layer = nn.Linear(WIDTH, 3)
    engine = Engine(layer)
    losses = of(layer(batch(samples, WIDTH)))
    return find(engine._channel, Objectives(losses, 0))


def the_only(found: dict[Use, Owners]) -> dict[int, Tensor]:
    """The owners along each dimension of the only use."""
    (owners,) = found.values()
    return owners


@pytest.mark.parametrize("find", METHODS)
@pytest.mark.parametrize("samples", [2, 3, 31, 32, 33, 64, 65])
def test_samples_in_order(find: Find, samples: int) -> None:
    found = the_only(owners(find, lambda y: y.sin().sum(1), samples))
    assert found[0].tolist() == list(range(samples))


@pytest.mark.parametrize("find", METHODS)
def test_samples_in_another_order(find: Find) -> None:
    """The place from which each loss is taken belongs to the sample of that loss."""
    order = torch.randperm(40)
    found = the_only(owners(find, lambda y: y.sin().sum(1)[order], 40))
    assert found[0][order.cpu()].tolist() == list(range(40))


@pytest.mark.parametrize("find", METHODS)
def test_places_without_a_cotangent(find: Find) -> None:
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
def test_places_of_several_samples(find: Find, name: str, samples: int) -> None:
    assert 0 not in the_only(owners(find, COUPLED[name], samples))


@pytest.mark.parametrize("find", METHODS)
def test_objectives_of_a_sample_that_cancel(find: Find) -> None:
    """Probabilities add up to one, so that equal weights would see nothing."""
    layer = nn.Linear(WIDTH, 3)
    engine = Engine(layer)
    losses = layer(batch(5, WIDTH)).softmax(1)
    found = the_only(find(engine._channel, Objectives(losses, 0)))
    assert found[0].tolist() == list(range(5))


def test_a_number_of_no_sample() -> None:
    """Rounding that differs from pass to pass may show several samples by turns."""
    zeros, spot = _Zeros(Objectives(torch.ones(3), 0)), Spot(0, 0, False, (3, 2))
    for weights in zeros.choices():
        if not weights[0]:  # the passes for digits of 1
            zeros.hear(spot, torch.ones(1, 3, 2))
    assert zeros.owners([spot]) == {spot: {}}
