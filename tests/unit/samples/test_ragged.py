"""Ragged samples: as many tokens of each in some steps, and other numbers in the next ones."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, irregular, trainable
from tests.unit.engines import batch, per_sample
from tests.unit.jacobians import assert_operator_is

WIDTH = 2
# Adds up tokens (T, WIDTH) by their samples (T,), of which there are so many: (B, WIDTH).
Pooling = Callable[[Tensor, Tensor, int], Tensor]


def is_of(owners: Tensor, samples: int) -> Tensor:
    """Whether a token is of a sample, ``(B, T)``."""
    return owners == torch.arange(samples).unsqueeze(1)


def by_where(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    return torch.where(is_of(owners, samples).unsqueeze(2), tokens, 0).sum(1)


def by_where_behind(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    return torch.where(is_of(owners, samples).T.unsqueeze(2), tokens.unsqueeze(1), 0).sum(0)


def by_mask(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    return (is_of(owners, samples).to(tokens).unsqueeze(2) * tokens).sum(1)


def by_maximum(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    floor = tokens.new_full((), -9.0)
    return torch.where(is_of(owners, samples).unsqueeze(2), tokens, floor).logsumexp(1)


def by_matrix(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    return is_of(owners, samples).to(tokens) @ tokens


def by_index_add(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    return torch.zeros(samples, WIDTH).index_add(0, owners, tokens)


def by_scatter_add(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    places = owners.unsqueeze(1).expand(-1, WIDTH)
    return torch.zeros(samples, WIDTH).scatter_add(0, places, tokens)


def by_loop(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    return torch.stack([tokens[owners == sample].sum(0) for sample in range(samples)])


def sizes_of(owners: Tensor, samples: int) -> list[int]:
    return torch.bincount(owners, minlength=samples).tolist()


def by_split(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    return torch.stack([some.sum(0) for some in tokens.split(sizes_of(owners, samples))])


def by_padding(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    return pad_sequence(tokens.split(sizes_of(owners, samples)), batch_first=True).sum(1)


def by_segments(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    lengths = torch.bincount(owners, minlength=samples)
    return torch.segment_reduce(tokens, "sum", lengths=lengths, axis=0)


def by_bags(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    ends = torch.bincount(owners, minlength=samples).cumsum(0)
    return F.embedding_bag(torch.arange(len(owners)), tokens, F.pad(ends[:-1], (1, 0)), mode="sum")


def by_running_sums(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    """Of sums that stop at each sample's end."""
    until = (torch.arange(len(owners)).unsqueeze(1) >= torch.arange(len(owners))).to(tokens)
    sums = (until * (owners.unsqueeze(1) == owners)) @ tokens
    is_last = torch.cat([owners[1:] != owners[:-1], torch.tensor([True])])
    return torch.zeros(samples, WIDTH).index_copy(0, owners[is_last], sums[is_last])


def sorted_by_value(tokens: Tensor, owners: Tensor, samples: int) -> Tensor:
    order = tokens[:, 0].argsort()
    return by_where(tokens[order], owners[order], samples)


POOLINGS: list[Pooling] = [
    *(by_where, by_where_behind, by_mask, by_maximum, by_matrix, by_index_add, by_scatter_add),
    *(by_loop, by_split, by_padding, by_segments, by_bags, by_running_sums, sorted_by_value),
]

# How many tokens each sample has, step by step.
SERIES = {
    "lengths": [(3, 3, 3), (2, 3, 4), (3, 3, 3), (1, 5, 3), (4, 1, 4)],
    "numbers": [(2, 2, 2), (3, 3, 3), (1, 3, 4, 1), (2, 2), (2, 2, 2, 2), (4, 1, 2)],
}


class Tokens(nn.Module):
    """A layer for tokens, one for samples, and again one for tokens that are kept by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, pool: Pooling, owners: Tensor, samples: int) -> Tensor:
        tokens = self.first(x).tanh()
        states = self.second(pool(tokens, owners, samples)).sin()
        is_kept = torch.arange(len(owners)) % 4 != 1
        return self.third(tokens[is_kept] * states[owners[is_kept]])


def losses_of_tokens(model: Tokens, x: Tensor, pool: Pooling, owners: Tensor) -> Tensor:
    """The losses of tokens, added up for each sample."""
    samples = int(owners[-1]) + 1
    return pool(model.first(x).square(), owners, samples) @ irregular(WIDTH)


def several_losses(model: Tokens, x: Tensor, pool: Pooling, owners: Tensor) -> Tensor:
    """Two for each sample, from states of the samples."""
    samples = int(owners[-1]) + 1
    states = model.second(pool(model.first(x).tanh(), owners, samples))
    return states.square() + states


def there_and_back(model: Tokens, x: Tensor, pool: Pooling, owners: Tensor) -> Tensor:
    """Tokens read the state of their sample, and some of them are left out."""
    samples = int(owners[-1]) + 1
    tokens = model(x, pool, owners, samples)
    is_kept = torch.arange(len(owners)) % 4 != 1
    return per_sample(by_where(tokens, owners[is_kept], samples))


def states_alone(model: Tokens, x: Tensor, pool: Pooling, owners: Tensor) -> Tensor:
    """Tokens read the state of their sample, and no parameter is used before that."""
    samples = int(owners[-1]) + 1
    states = model.second(pool(x, owners, samples)).tanh()
    return per_sample(pool((x * states[owners]).exp(), owners, samples))


LOSSES = [losses_of_tokens, several_losses, there_and_back, states_alone]


@pytest.mark.parametrize("series", SERIES.values(), ids=SERIES)
@pytest.mark.parametrize("pool", POOLINGS)
@pytest.mark.parametrize("losses_of", LOSSES)
def test_every_product_in_each_step(
    losses_of: Callable[..., Tensor], pool: Pooling, series: list[tuple[int, ...]]
) -> None:
    model = Tokens()
    engine = Engine(model, batch_dim=0, verify="never")
    parameters = trainable(model)

    def gramian(losses: Tensor, jacobian: Tensor) -> None:
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)

    def products(losses: Tensor, jacobian: Tensor) -> None:
        assert_operator_is(engine.jacobian(losses), jacobian)

    def fused(losses: Tensor, jacobian: Tensor) -> None:
        weights = irregular(losses.numel())
        engine.backward(losses, lambda _: weights)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        assert_close_to_reference(torch.cat([x.flatten() for x in gradients]), weights @ jacobian)
        model.zero_grad()

    calls = [gramian, products, fused]
    for step, lengths in enumerate(series):
        owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        x = batch(len(owners), WIDTH)
        compute = partial(losses_of, model, x, pool, owners)
        jacobian = reference_jacobian(compute(), parameters)
        for number in range(step, step + 2):
            calls[number % 3](compute(), jacobian)
