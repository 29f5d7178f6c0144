"""Places that the graph tells: no call makes another pass, whatever values and sizes are new."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from autogram import CoupledObjectivesWarning, Engine, MixedSamplesError
from tests.unit.engines import assert_exact, batch, counted_passes, per_sample

LENGTHS = [[3, 3, 3], [2, 4, 3], [5, 1, 3], [3, 3, 3], [1, 1, 7], [4, 4, 4]]
"""Of three samples in each step: as many tokens in all, but in the last one."""

Losses = Callable[["Tokens", Tensor, Tensor], Tensor]
"""From a model, features of tokens and the sample of each token."""


class Tokens(nn.Module):
    """Layers for tokens of all samples, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)
        self.cell = nn.LSTMCell(6, 3)

    def forward(self, x: Tensor, owners: Tensor, losses: Losses) -> Tensor:
        return losses(self, self.middle(self.first(x).tanh()).tanh(), owners)

    def each(self, h: Tensor) -> Tensor:
        """A number for each token."""
        return self.last(h).square().sum(-1)


def summed(values: Tensor, owners: Tensor) -> Tensor:
    """The sum over the tokens of each sample."""
    return values.new_zeros(3).index_add(0, owners, values)


def is_of(owners: Tensor) -> Tensor:
    """Which token is of which sample, ``(3, tokens)``."""
    return owners == torch.arange(3).unsqueeze(1)


def lengths_of(owners: Tensor) -> list[int]:
    return owners.bincount(minlength=3).tolist()


def chosen(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    return torch.where(is_of(owners), model.each(h), 0).sum(1)


def filled(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    return model.each(h).expand(3, -1).masked_fill(~is_of(owners), 0).sum(1)


def multiplied(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    return (is_of(owners).to(h) * model.each(h)).sum(1)


def averaged(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    weights = is_of(owners).to(h)
    return per_sample(model.last((weights / weights.sum(1, keepdim=True)) @ h))


def padded(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    return per_sample(model.last(pad_sequence(h.split(lengths_of(owners)), batch_first=True)))


def in_documents(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    """Attention inside of each sample, by a mask."""
    q = h.view(1, -1, 2, 3).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=owners.unsqueeze(1) == owners)
    return summed(model.each(y.transpose(1, 2).reshape(-1, 6)), owners)


def with_scores(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    """The same by a softmax of masked scores."""
    scores = (h @ h.T).masked_fill(owners.unsqueeze(1) != owners, -torch.inf)
    return summed(model.each(scores.softmax(1) @ h), owners)


def pooled(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    """As Set2Set: a recurrent query attends to the tokens of its sample, three times."""
    query = (h.new_zeros(3, 3), h.new_zeros(3, 3))
    read = h.new_zeros(3, 3)
    for _ in range(3):
        query = model.cell(torch.cat([query[0], read], 1), query)
        scores = (h[:, :3] * query[0][owners]).sum(1).exp()
        total = summed(scores, owners)
        weights = scores / total[owners]
        read = read.new_zeros(3, 3).index_add(0, owners, weights.unsqueeze(1) * h[:, :3])
    return per_sample(read)


def sorted_losses(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    return chosen(model, h, owners).sort(descending=True)[0]


def of_terms(model: Tokens, h: Tensor, owners: Tensor) -> Tensor:
    """Means of terms of different sizes, a loss each."""
    return torch.stack([model.each(part).mean() for part in h.split(lengths_of(owners))])


CASES: dict[str, Losses] = {
    "chosen": chosen,
    "filled": filled,
    "multiplied": multiplied,
    "averaged": averaged,
    "padded": padded,
    "in documents": in_documents,
    "with scores": with_scores,
    "pooled": pooled,
    "sorted losses": sorted_losses,
    "of terms": of_terms,
}


@pytest.mark.parametrize("losses", CASES.values(), ids=CASES)
def test_no_step_makes_another_pass(losses: Losses) -> None:
    model = Tokens()
    engine = Engine(model, verify="never", batch_dim=0)
    for lengths in LENGTHS:
        owners = torch.arange(3).repeat_interleave(torch.tensor(lengths))
        if losses is not padded and losses is not of_terms:
            owners = owners[torch.randperm(len(owners))]
        found = model(batch(len(owners), 4), owners, losses)
        with counted_passes(found) as passes:
            engine.compute_gramian(found)
        assert len(passes) == 1
        assert_exact(engine, model(batch(len(owners), 4), owners, losses), model)


@pytest.mark.parametrize("losses", CASES.values(), ids=CASES)
def test_several_objectives_for_each_sample(losses: Losses) -> None:
    model = Tokens()
    engine = Engine(model, batch_dim=0)
    for lengths in LENGTHS:
        owners = torch.arange(3).repeat_interleave(torch.tensor(lengths))
        found = model(batch(len(owners), 4), owners, losses)
        assert_exact(engine, torch.stack([found, found.exp()], 1), model)


def test_values_that_mix_samples_in_a_later_step() -> None:
    """A mask that lets a token attend to another sample: refused in that step, and in no other."""
    model = Tokens()
    engine = Engine(model, batch_dim=0)
    owners = torch.arange(3).repeat_interleave(3)

    def attended(model: Tokens, h: Tensor, documents: Tensor) -> Tensor:
        q = h.view(1, 1, -1, 6)
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=documents.unsqueeze(1) == documents)
        return summed(model.each(y[0, 0]), owners)

    wrong = owners.clone()
    wrong[3] = 0
    for documents in (owners, wrong, owners, wrong):
        losses = model(batch(9, 4), documents, attended)
        if documents is wrong:
            with pytest.raises(MixedSamplesError):
                engine.compute_gramian(losses)
        else:
            assert_exact(engine, losses, model)


def test_the_error_names_the_node_that_mixes() -> None:
    """Also its shape, and the parameters that it reads; and not the nodes behind it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    engine = Engine(model, batch_dim=0)
    with pytest.raises(MixedSamplesError, match="NativeBatchNormBackward0") as caught:
        engine.compute_gramian(per_sample(model(batch(5, 3))))
    assert "of a result of shape (5, 4), which reads `1.weight`, `1.bias`" in str(caught.value)
    assert "`linear` with `0.weight`, `0.bias`" in str(caught.value)


def test_hooks_that_mix_samples_are_found_by_the_first_check() -> None:
    """They are not in the graph."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for change in (lambda g: g - g.mean(0), lambda g: g.flip(0), lambda g: g.cumsum(0)):
        engine = Engine(model)
        hidden = model[:2](batch(5, 3))
        hidden.register_hook(change)
        losses = per_sample(model[2](hidden))
        with pytest.warns(CoupledObjectivesWarning, match="hook"):
            assert_exact(engine, losses, model)
