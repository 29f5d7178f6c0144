"""Slices of tensors that are changed in place, as decoders write their outputs one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from tests.unit._capture.seen import seen_uses
from tests.unit.engines import assert_exact, batch, counted_passes, per_sample
from tests.unit.series import BATCH_DIMS, MAY_BE_COUPLED, PLACES, assert_series_is_exact

WIDTH = 4
BATCHES = ((5, 6), (5, 6), (4, 6), (4, 4), (6, 6), (5, 4), (5, 6), (2, 3), (1, 4), (5, 6))
Change = Callable[["Changing", Tensor], Tensor]


class Changing(nn.Module):
    """Positions of each sample, ``(n, length, WIDTH)``, changed between two layers."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.row, self.pair = nn.Parameter(batch(WIDTH)), nn.Parameter(batch(2))
        self._change = change

    def forward(self, x: Tensor) -> Tensor:
        """Of shape ``(n, length or more, WIDTH)``."""
        return self.last(self._change(self, self.first(x).tanh().clone()))


def added(model: Changing, h: Tensor) -> Tensor:
    h[..., :2] += model.pair
    h[:, 1:].sub_(model.row, alpha=2)
    return h


def scaled(model: Changing, h: Tensor) -> Tensor:
    h.transpose(0, 1)[1:].mul_(model.row)
    h[:, :2, 2:].div_(model.pair.exp())
    h.flatten(1)[:, 3:5] *= model.pair
    return h


def written(model: Changing, h: Tensor) -> Tensor:
    """A token in front: a zero, then what all samples share."""
    longer = h.new_zeros(len(h), h.shape[1] + 1, WIDTH)
    longer[:, 1:] = h
    longer[:, 0] = model.row
    longer[..., 0, :2] = 0
    return longer


def written_into_a_constant(model: Changing, h: Tensor) -> Tensor:
    longer = torch.zeros(len(h), h.shape[1] + 2, WIDTH)
    longer[:, 0] = model.row
    longer[:, 2:] = h
    return longer


def decoded(model: Changing, h: Tensor) -> Tensor:
    outputs, state = torch.empty(h.shape[1], len(h), WIDTH), torch.zeros(len(h), WIDTH)
    for step, x in enumerate(h.unbind(1)):
        state = model.last(state + x).tanh()
        outputs[step] = state
    return outputs.transpose(0, 1)


def copied(model: Changing, h: Tensor) -> Tensor:
    outputs = torch.empty_like(h)
    outputs[..., :2].copy_(model.pair * h[..., :2])
    outputs[..., 2:].copy_(h[..., :2]).clamp_(-0.5, 0.5)
    outputs[:, -1].masked_fill_(torch.arange(WIDTH) > 2, 1.0)
    return outputs


def swapped(model: Changing, h: Tensor) -> Tensor:
    h[:, 0], h[:, 1] = 2 * h[:, 1], h[:, 0] + model.row
    return h


def padded_in_a_circle(model: Changing, h: Tensor) -> Tensor:
    """As convolutions with ``padding_mode="circular"`` are."""
    turned = F.pad(h.transpose(1, 2), (1, 2), mode="circular")
    return (
        F.pad(turned.unsqueeze(1), (0, 1, 1, 0), mode="circular")[:, 0, 1:].transpose(1, 2)
        * model.row
    )


def masked(model: Changing, h: Tensor) -> Tensor:
    """As hidden states are that a model has to predict."""
    mask = torch.rand(h.shape[:2]) < 0.4
    h[mask] = model.row
    h[h > 0.9] = model.pair[0]
    return h


CHANGES = [
    masked,
    padded_in_a_circle,
    added,
    scaled,
    written,
    written_into_a_constant,
    decoded,
    copied,
    swapped,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__)
def test_series_of_batches(change: Change) -> None:
    """Known batches need one backward pass, and no rows are explicit."""
    model = Changing(change)
    engine = Engine(model, verify="never")
    for step, (samples, length) in enumerate(BATCHES):
        with seen_uses() as seen:
            losses = per_sample(model(batch(samples, length, 3)))
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
        if step in (1, len(BATCHES) - 1):
            assert len(passes) == 1
            assert all(5 not in tracked.shape for use in seen for tracked in use.reads)
        assert_exact(engine, losses, model)
        assert all(use.rule for x in engine.report().parameters for use in x.uses) or samples == 1


def wrote(place: Callable[[Any], Any], of: Callable[[Tensor, Any], Tensor]) -> Any:
    """Writes into a place of zeros that the arguments name."""

    def operator(h: Tensor, argument: Any) -> Tensor:
        zeros = torch.zeros_like(h)
        zeros[place(argument)] = of(h, argument)
        return zeros + h / 2

    return operator


def wrote_in_order(h: Tensor, order: tuple[int, ...]) -> Tensor:
    zeros = torch.zeros_like(h)
    for row, source in enumerate(order):
        zeros[row] = h[source].cos()
    return zeros


def added_diagonally(h: Tensor, dims: tuple[int, int]) -> Tensor:
    """The diagonal of two dimensions: the samples are in the one or the other."""
    h = h.clone()
    h.diagonal(0, *dims).add_(h[..., 0].clone().sin())
    return h


def through_strides(h: Tensor, strides: tuple[int, int]) -> Tensor:
    """Of a tensor that was changed in place, a view with strides."""
    h = h.clone()
    h[:, 3] = 1.0
    return h.as_strided((4, 4), strides).cos()


ORDER, SWAPPED = ([k for k in order for _ in range(4)] for order in ((0, 1, 2, 3), (1, 0, 3, 2)))


def gathered(h: Tensor, argument: tuple[Any, tuple[int, int], list[int]]) -> Tensor:
    """Values that move no sample, if the slices before and behind are not the other ones."""
    place, strides, order = argument
    y = torch.zeros_like(h)
    y[place] = h[:, len(place)]
    y = y.gather(1, torch.tensor(order).view(1, 4, 4).expand(4, 4, 4)).clone()
    y[..., 3] *= 2.0
    return y.as_strided((4, 4), strides).sin()


SERIES: dict[str, tuple[Any, list[Any]]] = {
    "samples or positions": (
        wrote(lambda d: (slice(None),) * d + (0,), lambda h, d: h.select(d, 1)),
        [0, 1, 2],
    ),
    "from the one to the other": (
        wrote(lambda d: (slice(None),) * d + (0,), lambda h, d: h.select(1 - d, 1)),
        [1, 0],
    ),
    "other samples": (
        wrote(lambda k: slice(0, k), lambda h, k: h[4 - k :].sin()),
        [1, 2, 3, 4],
    ),
    "one by one": (wrote_in_order, [(0, 1, 2, 3), (1, 0, 2, 3), (3, 2, 1, 0), (0, 1, 1, 3)]),
    "every second": (
        wrote(lambda k: slice(None, None, k), lambda h, k: h[: len(range(0, 4, k))].sin()),
        [1, 2, 3],
    ),
    "diagonals": (added_diagonally, [(1, 2), (0, 1), (0, 2)]),
    "strides": (through_strides, [(16, 4), (4, 16), (16, 1), (1, 4)]),
    "gathered": (
        gathered,
        [
            ((slice(None), 0), (16, 1), ORDER),
            ((0,), (4, 1), ORDER),
            ((0,), (4, 1), SWAPPED),
        ],
    ),
    "positions by a list": (
        wrote(lambda k: (slice(None), k), lambda h, k: h[:, : len(k)].sin()),
        [[0, 1], [1, 0], [2, 3]],
    ),
    "samples by a list": (
        wrote(lambda k: (k,), lambda h, k: h[: len(k)].sin()),
        [[0, 1], [1, 0], [2, 3]],
    ),
}


@BATCH_DIMS
@PLACES
@MAY_BE_COUPLED
@pytest.mark.parametrize("name", SERIES)
def test_series_of_places(name: str, place: Any, batch_dim: Any) -> None:
    """With equal sizes, so that only the place of a change tells where the samples are."""
    operator, arguments = SERIES[name]
    modules, losses_of = place(operator, arguments[0])
    assert_series_is_exact(losses_of, modules, arguments, batch_dim=batch_dim)


def test_changes_without_gradients_and_in_unrecorded_code() -> None:
    """A node that a change without gradients leaves, or that nobody has seen, tells nothing."""

    class Unseen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: Tensor, rows: Tensor) -> Tensor:
            y = self.linear(x).clone()
            with engine.paused():
                y[:4] = y[rows].cos()
            with torch.no_grad():
                y[:, 0] = 1.0
            return y

    model = Unseen()
    engine = Engine(model, verify="never")
    x = batch(4, 3)
    for rows in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]):
        assert_exact(engine, per_sample(model(x, torch.tensor(rows))), model)


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
@pytest.mark.parametrize("rows", [[1], [1, 3], range(5)], ids=["one", "two", "all"])
def test_products_that_are_added_to_single_samples(rows: Sequence[int]) -> None:
    """The tap on such a sample is no node of the graph."""

    def change(model: Changing, h: Tensor) -> Tensor:
        y = h.clone()
        for row in rows:
            y[row].addmm_(h[row].sin(), model.last.weight)
        return y

    model = Changing(change)
    engine = Engine(model, batch_dim=0, verify="never")
    for _ in range(3):
        assert_exact(engine, per_sample(model(batch(5, 6, 3))), model)
