"""Several places for each sample along one dimension: by how much a node moves them is a number.

First some places have a cotangent, which fit regular places by accident, and then all of them.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from tests.unit.engines import assert_exact, assert_exact_in_one_pass, batch

B = 3

# From ``(6,)`` values and a start to places of samples, in rows of ``B``.
Part = Callable[[Tensor, int], Tensor]

PARTS: dict[str, tuple[Part, list[float]]] = {
    "a slice": (lambda h, start: h[start : start + B], [1, 1, 0]),
    "narrow": (lambda h, start: h.narrow(0, start, B), [1, 1, 0]),
    "split": (lambda h, start: h.split([start, B, B - start])[1], [1, 1, 0]),
    "a padded tensor": (
        lambda h, start: F.pad(h, (start, 6 - start)),
        [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0],
    ),
}


@pytest.mark.parametrize("starts", [(0, 1), (1,)])
@pytest.mark.parametrize("name", PARTS)
def test_start(name: str, starts: tuple[int, ...]) -> None:
    part, some = PARTS[name]
    model = nn.Linear(3, 3)
    engine = Engine(model, batch_dim=0, verify="never")
    for start in starts:
        for mask in ([1.0], [1.0], some, some, [1.0], [1.0]) if start == 0 else (some, some, [1.0]):
            places = part(model(batch(6, 3)).square().sum(1), start) * torch.tensor(mask)
            assert_exact(engine, places.view(-1, B).sum(0), model)


def test_views_that_put_dimensions_together_at_other_sizes() -> None:
    model = nn.Linear(3, 3)
    engine = Engine(model, batch_dim=0, verify="never")

    def step(columns: int, mask: Tensor) -> None:
        h = model(batch(8, columns, 3)).square().sum(2) * mask
        assert_exact(engine, h.flatten().view(-1, 4, 2).sum((0, 2)), model)

    for _ in range(2):
        step(2, torch.ones(()))
    some = torch.zeros(8, 6)
    some[::2, :2] = some[1::2, 4:] = 1
    for mask in (some, some, torch.ones(()), torch.ones(())):
        step(6, mask)


@pytest.mark.parametrize(
    "part",
    [
        lambda h: torch.cat([h, h.exp()]).tanh().chunk(2)[1],
        lambda h: torch.cat([h, h.exp()]).tanh()[len(h) :],
        lambda h: (
            h.unsqueeze(1).expand(-1, 4, -1).flatten(0, 1).tanh().unflatten(0, (-1, 4)).sum(1)
        ),
    ],
)
def test_ordinary_series_need_no_further_pass(part: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(3, 3)
    engine = Engine(model, batch_dim=0, verify="never")
    for _ in range(3):
        losses = part(model(batch(B, 3))).square().sum(1)
        assert_exact_in_one_pass(engine, losses, model)
