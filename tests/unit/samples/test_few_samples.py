"""Calls that few samples reach: behind ends of sequences, margins, and labels that are missing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from tests.unit.engines import assert_exact, batch, counted_passes, mlp, per_sample

SAMPLES, STEPS = 9, 12
Losses = Callable[[nn.Module, int], Tensor]


def reached(step: int, *sizes: int) -> Tensor:
    """Three of each nine samples, others in each step."""
    numbers = torch.arange(SAMPLES).view(-1, *(1,) * len(sizes)) + torch.zeros(sizes)
    for dim, size in enumerate(sizes, 1):
        numbers = numbers + 2 * torch.arange(size).view(-1, *(1,) * (len(sizes) - dim))
    return (numbers + step) % SAMPLES < 3


class Recurrent(nn.Module):
    """A loop over the positions of sequences, each of which ends at a length of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), 5)
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], (h, c))
            goes_on = (position < lengths).unsqueeze(1)
            h, c = (torch.where(goes_on, new, old) for new, old in zip(state, (h, c), strict=True))
        return self.last(h)


class Heads(nn.Module):
    """A trunk, and a layer for each of three tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x).tanh()
        return torch.cat([head(hidden) for head in self.heads], 1)


def ended(model: nn.Module, step: int) -> Tensor:
    lengths = (torch.arange(SAMPLES) + step) % 4 + 1
    return per_sample(model(batch(SAMPLES, 4, 3), lengths))


def margins(model: nn.Module, step: int) -> Tensor:
    return torch.where(reached(step), per_sample(model(batch(SAMPLES, 3))), 0.0)


def labels(model: nn.Module, step: int) -> Tensor:
    return torch.where(reached(step, 3), model(batch(SAMPLES, 3)).square(), 0.0)


def picked(model: nn.Module, step: int) -> Tensor:
    """By an index that has all rows in order, and by another one that changes at each step."""
    output = model(batch(SAMPLES, 3))
    return output[torch.arange(SAMPLES), torch.arange(SAMPLES) % (step % 2 + 1)] * reached(step)


CASES: dict[str, tuple[Callable[[], nn.Module], Losses]] = {
    "ended": (Recurrent, ended),
    "margins": (mlp, margins),
    "labels": (Heads, lambda model, step: labels(model, step).sum(1)),
    "labels of tasks": (Heads, labels),
    "picked": (mlp, picked),
}


@pytest.mark.parametrize("name", CASES)
def test_others_in_each_step(name: str) -> None:
    """The graph tells where all samples are, also those without a cotangent in a step."""
    make, losses_of = CASES[name]
    model = make()
    engine = Engine(model, verify="never")
    counts = []
    for step in range(STEPS):
        losses = losses_of(model, step)
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
        counts.append(len(passes))
        assert_exact(engine, losses, model)
    assert set(counts) == {1}


@pytest.mark.parametrize("name", CASES)
def test_the_same_in_each_step(name: str) -> None:
    """Layouts that fit are right as long as they agree on all places that have a cotangent."""
    make, losses_of = CASES[name]
    model = make()
    engine = Engine(model, verify="never")
    for step in (0, 0, 0, 1, 0, 2, 2, 2, 0):
        losses = losses_of(model, step)
        assert_exact(engine, losses, model)
    with counted_passes(losses) as passes:
        engine.compute_gramian(losses)
    assert len(passes) == 1


def moved_few(h: Tensor, step: int) -> Tensor:
    """Two rows of other samples, in the places of two that are reached."""
    places, rows = torch.tensor([[-step, 1 - step], [step, step + 4]]) % SAMPLES
    return torch.zeros_like(h).index_copy(0, places, h[rows])


MOVES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "index": lambda h, step: h[torch.arange(SAMPLES).roll(step // 3)],
    "index of few": moved_few,
    "values": lambda h, step: h.gather(0, h.argsort(0).roll(step, 0)),
    "matrix": lambda h, step: torch.eye(SAMPLES).roll(step // 3, 0) @ h,
    "slice": lambda h, step: F.pad(h[step % 2 :], (0, 0, 0, step % 2)),
}


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("batch_dim", ["auto", 0])
@pytest.mark.parametrize("name", MOVES)
def test_samples_that_are_moved(name: str, batch_dim: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    engine = Engine(model, verify="never", batch_dim=batch_dim)
    for step in range(STEPS):
        moved = MOVES[name](model(batch(SAMPLES, 3)), step)
        assert_exact(engine, per_sample(moved) * reached(step), model)


class Scrambled(nn.Module):
    """A view that takes positions for samples, between two layers, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        samples, positions, _ = x.shape
        hidden = self.first(x).tanh().view(positions, samples, -1)
        return self.last(hidden).view(samples, positions, -1).tanh()


@pytest.mark.parametrize("first", [[(0, 0), (2, 1)], [(0, 0)], [(2, 1)]])
def test_views_that_scramble_the_samples(first: list[tuple[int, int]]) -> None:
    """Some positions of some samples lie as if a dimension of the view counted the samples."""
    model = Scrambled()
    engine = Engine(model, verify="never")
    for alive in (first, [(0, 0)], [(2, 1)], [(1, 0)], [(0, 0), (1, 1)], [(2, 0)], [(0, 1)]):
        mask = torch.zeros(3, 2, 1)
        for place in alive:
            mask[place] = 1.0
        assert_exact(engine, per_sample(model(batch(3, 2, 3)) * mask), model)
