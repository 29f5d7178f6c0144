"""Rules of reading rows of a table."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, UnsupportedError
from autogram.testing import reference_jacobian
from tests.unit.checks import (
    EVERY_KIND,
    ModelFactory,
    Objectives,
    assert_close_to_reference,
    assert_gramian_is_exact,
)
from tests.unit.networks import call
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact

TOKENS = 7


class TiedLanguageModel(nn.Module):
    """An embedding whose table is also the weight of the output layer."""

    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)
        self.hidden = nn.Linear(4, 4)
        self.transposed = transposed

    def forward(self, tokens):
        x = self.hidden(self.embedding(tokens)).tanh()
        table = self.embedding.weight
        return x @ table.T if self.transposed else F.linear(x, table)


class SameTableTwice(nn.Module):
    """Two sequences of different lengths, read from one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)

    def forward(self, tokens):
        first, second = self.embedding(tokens), self.embedding(tokens[:, :2].flip(1))
        return torch.cat([first, second.sin()], 1)


def sequence_first(tokens, table):
    return F.embedding(tokens.T, table).transpose(0, 1)


def folded(tokens, table):
    return F.embedding(tokens.reshape(-1), table).unflatten(0, tokens.shape)


def folded_sequence_first(tokens, table):
    return F.embedding(tokens.T.reshape(-1), table).unflatten(0, tokens.T.shape).transpose(0, 1)


CASES = [
    pytest.param(lambda: nn.Embedding(TOKENS, 4), (3, 5), id="embedding"),
    pytest.param(lambda: nn.Embedding(TOKENS, 4), (3,), id="one token for each sample"),
    pytest.param(lambda: nn.Embedding(TOKENS, 4), (3, 2, 4), id="two dimensions of positions"),
    pytest.param(lambda: nn.Embedding(TOKENS, 4), (3, 40), id="more positions than tokens"),
    pytest.param(lambda: nn.Embedding(TOKENS, 1), (3, 5), id="one column"),
    pytest.param(call(lambda x, table: F.embedding(x * 0, table), (1, 4)), (3, 5), id="one row"),
    pytest.param(lambda: nn.Embedding(TOKENS, 4, padding_idx=2), (3, 5), id="padding"),
    pytest.param(
        lambda: nn.Embedding(TOKENS, 4, padding_idx=-1), (3, 20), id="padding from the end"
    ),
    pytest.param(lambda: nn.Embedding(TOKENS, 4, sparse=True), (3, 5), id="sparse gradients"),
    pytest.param(call(F.embedding, (TOKENS, 4)), (3, 5), id="function"),
    pytest.param(
        call(lambda x, table: torch.embedding(table, x), (TOKENS, 4)), (3, 5), id="torch.embedding"
    ),
    pytest.param(
        call(lambda x, table: torch.embedding(table, x, 3), (TOKENS, 4)),
        (3, 5),
        id="torch.embedding, padding",
    ),
    pytest.param(call(lambda x, table: table[x], (TOKENS, 4)), (3, 5), id="table[indices]"),
    pytest.param(
        call(lambda x, table: table[x - TOKENS], (TOKENS, 4)), (3, 5), id="negative indices"
    ),
    pytest.param(call(lambda x, table: table[(x,)], (TOKENS, 4)), (3, 5), id="table[(indices,)]"),
    pytest.param(call(lambda x, vector: vector[x], (TOKENS,)), (3, 5), id="vector[indices]"),
    pytest.param(call(lambda x, table: table[x], (TOKENS, 2, 3)), (3, 5), id="table of matrices"),
    pytest.param(
        call(lambda x, table: table[0, x], (2, TOKENS, 3)), (3, 5), id="table[0, indices]"
    ),
    pytest.param(call(lambda x, table: table[x, 1:], (TOKENS, 3)), (3, 5), id="table[indices, 1:]"),
    pytest.param(
        call(lambda x, table: table[:, x].transpose(0, 1), (3, TOKENS)), (3, 5), id="table[:, i]"
    ),
    pytest.param(
        call(lambda x, table: table[x, x.flip(1)], (TOKENS, TOKENS)),
        (3, 5),
        id="table[rows, columns]",
    ),
    pytest.param(
        call(lambda x, table: table.index_select(0, x), (TOKENS, 4)), (3,), id="method index_select"
    ),
    pytest.param(
        call(lambda x, table: torch.index_select(table, -2, x), (TOKENS, 4)),
        (3,),
        id="index_select, dimension from the end",
    ),
    pytest.param(
        call(lambda x, table: table.index_select(1, x).T, (4, TOKENS)),
        (3,),
        id="index_select, columns",
    ),
    pytest.param(call(sequence_first, (TOKENS, 4)), (3, 5), id="sequence first"),
    pytest.param(call(folded, (TOKENS, 4)), (3, 5), id="folded"),
    pytest.param(call(folded_sequence_first, (TOKENS, 4)), (3, 5), id="folded sequence first"),
]

MODELS = [
    pytest.param(TiedLanguageModel, id="tied to the output layer"),
    pytest.param(
        lambda: TiedLanguageModel(transposed=True), id="tied to the output layer, transposed"
    ),
    pytest.param(SameTableTwice, id="same table twice"),
]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_gramian_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    assert_rule_is_exact(make_model, torch.randint(0, TOKENS, shape), wrap, objectives)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("limit", [1, 2**29])
@pytest.mark.parametrize("make_model", MODELS)
def test_shared_table(make_model: ModelFactory, limit: int, objectives: Objectives) -> None:
    tokens = torch.randint(0, TOKENS, (3, 5))
    assert_gramian_is_exact(make_model, tokens, objectives=objectives, memory_limit_bytes=limit)


def test_max_norm_is_refused() -> None:
    model = nn.Embedding(TOKENS, 4, max_norm=1.0)
    before = model.weight.detach().clone()
    engine = Engine(model)
    with pytest.raises(UnsupportedError, match="max_norm"):
        model(torch.tensor([1, 2]))
    assert torch.equal(model.weight, before)
    del engine


def test_scale_grad_by_freq_is_refused() -> None:
    model = nn.Embedding(TOKENS, 4, scale_grad_by_freq=True)
    engine = Engine(model)
    with pytest.raises(UnsupportedError, match="scale_grad_by_freq"):
        model(torch.tensor([1, 2]))
    del engine


class Clicks(nn.Module):
    """First-order terms of categories, from tables of one column that are read elsewhere, too."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Embedding(9, 1), nn.Embedding(9, 1), nn.Linear(5, 1)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        read = self.first(x), self.second(x[:, :1]), self.second(x[:, 1:2])
        score = self.last(torch.cat([tensor.flatten(1) for tensor in read], 1))
        if self.tied:
            weight = self.first.weight
            score = score + F.linear(score.sin(), weight).square().mean(1, keepdim=True)
            score = score * weight[:, 0].mean()
        return score.square().squeeze(1)


@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_one_column(tied: bool) -> None:
    """Their columns are as those of a vector. The Gramian makes no rows of a table."""
    model = Clicks(tied=tied)
    engine = Engine(model, verify="always")
    parameters = [*model.parameters()]
    for samples in (6, 4):
        losses, others = (model(torch.randint(9, (n, 3))) for n in (samples, 5))
        rows, rows_of_others = (reference_jacobian(x, parameters) for x in (losses, others))
        assert_close_to_reference(engine.compute_gramian(losses), rows @ rows.T)
        jacobian = engine.jacobian(losses)
        other = engine.jacobian(others)
        assert_close_to_reference(jacobian.cross_gramian(other), rows @ rows_of_others.T)
        assert_close_to_reference(jacobian.row_norms(), rows.norm(dim=1))
        assert_close_to_reference(jacobian.dense(), rows)
        weights, direction = torch.rand(samples), torch.rand(rows.shape[1])
        sizes = [p.numel() for p in parameters]
        parts = [x.view(p.shape) for x, p in zip(direction.split(sizes), parameters, strict=True)]
        named = dict(zip([name for name, _ in model.named_parameters()], parts, strict=True))
        assert_close_to_reference(jacobian.jvp(named), rows @ direction)
        engine.backward(losses, lambda _, weights=weights: weights)
        found = torch.cat([p.grad.flatten() for p in parameters])
        assert_close_to_reference(found, weights @ rows)
        model.zero_grad()
    if not tied:
        assert [x.plan for x in engine.report().parameters[:2]] == ["lookup"] * 2
