"""Losses as K objectives for each of B samples."""

import pytest
import torch
from torch import Tensor

from autogram._capture.samples.objectives import Objectives
from tests.unit.engines import batch

SHAPES = [
    ((), None, 1, 1),
    ((5,), 0, 5, 1),
    ((5,), None, 1, 5),
    ((4, 3), 0, 4, 3),
    ((3, 4), 1, 4, 3),
    ((3, 4), -1, 4, 3),
    ((3, 4), None, 1, 12),
    ((2, 4, 3), 1, 4, 6),
    ((2, 3, 4), -1, 4, 6),
]


@pytest.mark.parametrize(("shape", "batch_dim", "samples", "each"), SHAPES)
def test_cotangents_take_one_objective_of_all_samples(
    shape: tuple[int, ...], batch_dim: int | None, samples: int, each: int
) -> None:
    """Together they take every loss once, and each of them at most one of a sample."""
    objectives = Objectives(batch(*shape), batch_dim)
    assert (objectives.samples, objectives.per_sample) == (samples, each)
    cotangents = objectives.cotangents()
    assert cotangents.shape == (each, *shape)
    assert torch.equal(cotangents.sum(0), torch.ones(shape))
    for cotangent in cotangents:
        assert torch.equal(of_samples(cotangent, batch_dim), torch.ones(samples))


@pytest.mark.parametrize(("shape", "batch_dim", "samples", "each"), SHAPES)
def test_gramian_is_arranged_like_the_losses(
    shape: tuple[int, ...], batch_dim: int | None, samples: int, each: int
) -> None:
    """Rows in the order (objective, sample) go to the row-major order of the losses."""
    objectives = Objectives(batch(*shape), batch_dim)
    rows = objectives.cotangents().unsqueeze(1) * one_each(shape, batch_dim, samples)
    rows = rows.reshape(each * samples, -1)  # where each (objective, sample) stands in the losses
    gramian = batch(each * samples, each * samples)
    assert torch.equal(objectives.in_order(gramian, 0, 1), rows.T @ gramian @ rows)


def of_samples(cotangent: Tensor, batch_dim: int | None) -> Tensor:
    """Sums over everything but the samples."""
    if batch_dim is None:
        return cotangent.sum().view(1)
    return cotangent.movedim(batch_dim, 0).flatten(1).sum(1) if cotangent.dim() > 1 else cotangent


def one_each(shape: tuple[int, ...], batch_dim: int | None, samples: int) -> Tensor:
    """For each sample, ones at its losses and zeros elsewhere: `(b, *losses)`."""
    if batch_dim is None:
        return torch.ones(1, *shape)
    eye = torch.eye(samples).view(samples, *(1,) * (batch_dim % len(shape)), samples)
    return eye.view(*eye.shape, *(1,) * (len(shape) + 1 - eye.dim())).expand(samples, *shape)
