"""Samples in irregular places: tokens routed to experts, ragged batches, chosen samples."""

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, MixedSamplesError
from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SECOND,
    SEVERAL,
    Objectives,
    assert_gramian_is_exact,
    features,
    irregular,
)
from tests.unit.engines import assert_exact, batch, counted_passes, per_sample

WIDTH = 4
EXPERTS = 3


class Experts(nn.Module):
    """Each token goes through the two experts that its router prefers."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias) for _ in range(EXPERTS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).flatten(0, -2)
        scores, chosen = self.router(tokens).softmax(1).topk(2)
        mixed = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            output = self.norm(expert(tokens[token]).tanh()) * scores[token, place, None]
            mixed = mixed.index_add(0, token, output)
        return (tokens + mixed).view(x.shape)


class StackedExperts(nn.Module):
    """The same with the experts' weights in one tensor, in an order sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(irregular(EXPERTS, WIDTH, WIDTH))
        self.bias = nn.Parameter(irregular(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).softmax(1).max(1)
        order = chosen.argsort()
        ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).tolist()
        parts = []
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            mine = tokens[order[start:end]]
            parts.append(torch.addmm(self.bias[i], mine, self.weight[i].T).sin())
        output = torch.cat(parts) * scores[order, None]
        return torch.empty_like(output).index_copy(0, order, output).view(x.shape)


class Gathered(nn.Module):
    """The experts' weights are gathered token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(irregular(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).softmax(1).max(1)
        output = torch.bmm(self.weight[chosen], tokens.unsqueeze(2)).squeeze(2)
        return (output * scores.unsqueeze(1)).view(x.shape)


class Packed(nn.Module):
    """Sequences of different length, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(irregular(WIDTH))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        is_there = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        tokens = self.last((self.first(x[is_there]) + self.shift).tanh())
        return torch.zeros_like(x).masked_scatter(is_there.unsqueeze(2), tokens)


EVERY_KIND = [PER_SAMPLE, SEVERAL, SECOND, COUPLED]


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("model", [Experts, StackedExperts, Gathered])
def test_experts(model, objectives: Objectives) -> None:
    assert_gramian_is_exact(model, torch.randn(5, 6, WIDTH), objectives=objectives)


@pytest.mark.parametrize("samples", [2, 33, 40])
def test_many_samples(samples: int) -> None:
    """More than can be told apart by one code."""
    assert_gramian_is_exact(Experts, torch.randn(samples, 2, WIDTH))


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
def test_sequences_one_behind_the_other(objectives: Objectives) -> None:
    lengths = torch.tensor([3, 1, 5, 2])
    assert_gramian_is_exact(Packed, torch.randn(4, 5, WIDTH), lengths, objectives=objectives)


def test_another_routing_at_each_step() -> None:
    model = Experts()
    engine = Engine(model, batch_dim=0)
    for _ in range(6):
        assert_exact(engine, per_sample(model(batch(5, 6, WIDTH))), model)


def test_routing_that_no_index_tells() -> None:
    """Floating-point values alone decide where the samples go."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, permutation: Tensor) -> Tensor:
            return permutation.T @ self.last(permutation @ self.first(x)).sin()

    model = Model()
    engine = Engine(model, batch_dim=0)
    for _ in range(5):
        permutation = torch.eye(6)[torch.randperm(6)]
        assert_exact(engine, per_sample(model(batch(6, WIDTH), permutation)), model)


def test_passes_of_a_step() -> None:
    """Where tokens are routed is computed, and not searched for."""
    counts = []
    for model in (Experts(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())):
        engine = Engine(model, verify="never")
        engine.compute_gramian(per_sample(model(batch(8, 5, WIDTH))))
        engine.compute_gramian(per_sample(model(batch(8, 5, WIDTH))))
        losses = per_sample(model(batch(8, 5, WIDTH)))
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
        counts.append(len(passes))
    assert counts == [1, 1]


def test_mixed_tokens_are_found_among_routed_ones() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()
            self.is_mixing = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.experts(x)
            return y + 1e-6 * y.roll(1, 0) if self.is_mixing else y

    model = Model()
    engine = Engine(model, batch_dim=0)
    for _ in range(3):
        assert_exact(engine, per_sample(model(batch(5, 6, WIDTH))), model)
    model.is_mixing = True
    with pytest.raises(MixedSamplesError, match="experts"):
        engine.compute_gramian(per_sample(model(batch(5, 6, WIDTH))))


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("eager", torch.float64),
        ("batched_mm", torch.float64),
        ("grouped_mm", torch.float32),  # the kernel takes nothing longer
    ],
)
def test_mixtral(implementation: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    config = transformers.MixtralConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        max_position_embeddings=16,
        sliding_window=None,
    )
    config._experts_implementation = implementation
    model = transformers.MixtralForCausalLM(config)
    engine = Engine(model, batch_dim=0)
    for _ in range(3):
        logits = model(torch.randint(17, (3, 4)), use_cache=False).logits
        assert_exact(engine, features(logits, 1).squeeze(1), model)


def test_sequences_packed_for_cross_entropy() -> None:
    """Losses of the tokens that are there, added up for each sample."""
    model = nn.Sequential(nn.Linear(WIDTH, 7))
    engine = Engine(model, batch_dim=0)
    for _ in range(3):
        is_there = torch.rand(4, 5) < 0.7
        is_there[:, 0] = True
        logits = model(batch(4, 5, WIDTH)[is_there])
        of_tokens = F.cross_entropy(logits, torch.randint(7, (len(logits),)), reduction="none")
        losses = torch.zeros(4).index_add(0, is_there.nonzero()[:, 0], of_tokens)
        assert_exact(engine, losses, model)
