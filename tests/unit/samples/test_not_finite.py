"""Samples that are not finite, beside others: their rows alone are not, wherever samples lie."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, UnverifiedWarning
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import batch, per_sample

SAMPLES, WIDTH = 6, 4


class Experts(nn.Module):
    """Each token goes to the expert that a router prefers, and comes back by one of some ways."""

    def __init__(self, back: Callable[[Tensor, list[Tensor], list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(1).max(1)
        places = [torch.where(chosen == i)[0] for i in range(len(self.experts))]
        pairs = zip(self.experts, places, strict=True)
        outputs = [expert(tokens[own]).tanh() * scores[own, None] for expert, own in pairs]
        return self.last((tokens + self.back(tokens, places, outputs)).unflatten(0, x.shape[:2]))


def by_index_add(tokens: Tensor, places: list[Tensor], outputs: list[Tensor]) -> Tensor:
    total = torch.zeros_like(tokens)
    for own, output in zip(places, outputs, strict=True):
        total = total.index_add(0, own, output)
    return total


def by_order(tokens: Tensor, places: list[Tensor], outputs: list[Tensor]) -> Tensor:
    return torch.empty_like(tokens).index_copy(0, torch.cat(places), torch.cat(outputs))


class Chosen(nn.Module):
    """Some tokens of each sample, other numbers of each, in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.scale = nn.Parameter(batch(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).flatten(0, 1)
        order = torch.arange(5, len(tokens) * 5 - 9, 5) % len(tokens)
        owners = torch.arange(len(x)).repeat_interleave(x.shape[1])[order]
        outputs = self.last(tokens[order].sin() * self.scale)
        return torch.zeros(len(x), 2).index_add(0, owners, outputs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "index_add": lambda: Experts(by_index_add),
    "in order of experts": lambda: Experts(by_order),
    "chosen tokens": Chosen,
}
BAD = {"two": [1, 3], "four": [0, 2, 4, 5], "all but one": [0, 1, 2, 4, 5]}
# The value that spoils a sample, and in which token: `None` for all.
SPOILT = {"nan": (torch.nan, None), "infinite": (torch.inf, None), "nan in a token": (torch.nan, 1)}


def ones_for(gramian: Tensor) -> Tensor:
    return torch.ones(len(gramian))


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return per_sample(model(x))


def spoilt(x: Tensor, bad: list[int], value: float, token: int | None) -> Tensor:
    """A copy in which all tokens of some samples, or one of them, have such values."""
    x = x.clone()
    x[bad, slice(None) if token is None else token] = value
    return x


def assert_rows(found: Tensor, expected: Tensor, bad: list[int]) -> None:
    """Assert that rows are right, and those of some samples not finite, or right where finite."""
    good = [i for i in range(SAMPLES) if i not in bad]
    assert_close_to_reference(found[good], expected[good])
    assert not found[bad].isfinite().all(1).any()
    is_finite = found[bad].isfinite()
    torch.testing.assert_close(found[bad][is_finite], expected[bad][is_finite])


def rows_alone(
    losses: Callable[[Tensor], Tensor],
    parameters: list[nn.Parameter],
    x: Tensor,
    spoil: Callable[[Tensor, list[int]], Tensor],
    bad: list[int],
) -> Tensor:
    """The Jacobian by plain autograd, with one sample that is not finite at a time.

    Those of several would be in the rows of all samples, as zero times infinity.
    """
    jacobian = reference_jacobian(losses(x), parameters)
    for sample in bad:
        jacobian[sample] = reference_jacobian(losses(spoil(x, [sample]))[[sample]], parameters)
    return jacobian


@pytest.mark.parametrize(("value", "token"), SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("steps_before", [0, 2], ids=["new", "known"])
@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_rows_of_the_other_samples(
    make_model: Callable[[], nn.Module],
    steps_before: int,
    bad: list[int],
    value: float,
    token: int | None,
) -> None:
    """Each product at a new graph or a known one, at once and after the others."""
    spoil = partial(spoilt, value=value, token=token)
    good = [i for i in range(SAMPLES) if i not in bad]

    def assert_gramian(gramian: Tensor, jacobian: Tensor) -> None:
        rows = jacobian[good]
        assert_close_to_reference(gramian[good][:, good], rows @ rows.T)
        assert not gramian[bad].isfinite().any()
        assert not gramian[:, bad].isfinite().any()

    for first in range(3):
        model = make_model()
        engine = Engine(model, batch_dim=0, verify="never")
        losses = partial(losses_of, model)
        for _ in range(steps_before):
            engine.compute_gramian(losses(batch(SAMPLES, 3, 3)))
        for number in range(first, first + 2):
            x = batch(SAMPLES, 3, 3)
            jacobian = rows_alone(losses, trainable(model), x, spoil, bad)
            found = losses(spoil(x, bad))
            if number % 3 == 0:
                assert_gramian(engine.compute_gramian(found), jacobian)
            elif number % 3 == 1:
                assert_rows(engine.jacobian(found).dense(), jacobian, bad)
            else:
                _, gramian = engine.backward(found, ones_for, return_gramian=True)
                assert_gramian(gramian, jacobian)
                total = torch.cat([p.grad.flatten() for p in trainable(model)])
                is_finite = total.isfinite()
                torch.testing.assert_close(total[is_finite], jacobian.sum(0)[is_finite])
                model.zero_grad()
        x = batch(SAMPLES, 3, 3)
        jacobian = reference_jacobian(losses(x), trainable(model))
        assert_close_to_reference(engine.compute_gramian(losses(x)), jacobian @ jacobian.T)


def test_several_objectives_and_what_is_said_of_them() -> None:
    """One objective of a sample is enough for its rows not to be finite."""
    model = Experts(by_index_add)
    engine = Engine(model)
    x = batch(SAMPLES, 3, 3)

    def losses(x: Tensor) -> Tensor:
        one = per_sample(model(x))
        return torch.stack([one, one.sin()], 1)

    jacobian = reference_jacobian(losses(x), trainable(model))
    with pytest.warns(UnverifiedWarning, match=r"objectives 2, 3, 6, 7 .*Only their rows"):
        gramian = engine.compute_gramian(losses(spoilt(x, [1, 3], torch.inf, None)))
    good = [0, 1, 4, 5, 8, 9, 10, 11]
    rows = jacobian[good]
    assert_close_to_reference(gramian[good][:, good], rows @ rows.T)
    assert "routed)" in str(engine.report())


class Rows(nn.Module):
    """A layer for some rows, of which the last one adds nothing to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.tensor([0, 2, 0])
        outputs = self.layer(x[places]) * torch.tensor([[1.0], [1.0], [0.0]])
        return torch.zeros(3, 2).index_add(0, places, outputs)


def test_rows_where_one_of_the_samples_is_missing() -> None:
    """A layout in which each sample has one row fits by accident, and has another sample there."""
    model = Rows()
    engine = Engine(model, batch_dim=0, verify="never")
    x = batch(3, 3)
    x[2] = torch.nan
    losses = per_sample(model(x)) + torch.tensor([0.0, torch.inf, 0.0])
    gramian = engine.compute_gramian(losses)
    (row,) = torch.autograd.grad(per_sample(model(x[[0, 0, 0]]))[0], model.layer.weight)
    assert_close_to_reference(gramian[0, 0], row.square().sum())
    assert not gramian[2].isfinite().any()


class Exchanged(nn.Module):
    """Samples exchange their first tokens, before these a convolution along which none can be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(5, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cat([y[:, :1].roll(1, 0), y[:, 1:]], 1)


def test_samples_along_no_dimension() -> None:
    """What the call saved is one for all samples of a row: the other one is not finite either."""
    model = Exchanged()
    engine = Engine(model, batch_dim=0)
    x, good = batch(SAMPLES, 5, 4), [0, 3, 4, 5]
    rows = reference_jacobian(per_sample(model(x)), trainable(model))[good]
    with pytest.warns(UnverifiedWarning):
        gramian = engine.compute_gramian(per_sample(model(spoilt(x, [1], torch.nan, None))))
    assert_close_to_reference(gramian[good][:, good], rows @ rows.T)
    assert not gramian[[1, 2]].isfinite().any()


class Padded(nn.Module):
    """Sums of tokens that are one behind the other, read beyond the end of each short sample.

    What is read there is of the next sample, and is multiplied by zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([2, 1, 3, 2])
        places = (lengths.cumsum(0) - lengths).unsqueeze(1) + torch.arange(3)
        is_there = torch.arange(3) < lengths.unsqueeze(1)
        tokens = self.layer(x).tanh()[places.clamp(max=len(x) - 1)]
        return (tokens * is_there.unsqueeze(2)).sum(1)


def test_infinities_that_reach_another_sample() -> None:
    """The row of that sample is not finite either, where zeros are multiplied with infinities."""
    model = Padded()
    engine = Engine(model, batch_dim=0)
    x = batch(8, 3)
    x[0] = torch.nan
    losses = per_sample(model(x))
    assert losses.isfinite().tolist() == [False, True, True, True]
    with pytest.warns(UnverifiedWarning):
        gramian = engine.compute_gramian(losses)
    rows = reference_jacobian(per_sample(model(x.nan_to_num())), trainable(model))[2:]
    assert_close_to_reference(gramian[2:, 2:], rows @ rows.T)
    assert not gramian[:2].isfinite().any()
