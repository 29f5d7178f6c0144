"""Masks that change at every step and move nothing: one pass over the activations a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from autogram import Engine
from tests.unit.checks import features
from tests.unit.engines import assert_exact, counted_passes

SAMPLES, POSITIONS, STEPS = 4, 6, 6
BATCH_DIMS = pytest.mark.parametrize("batch_dim", ["auto", 0])


class Encoder(nn.Module):
    """A transformer of PyTorch, whose mask says what is padding."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.table = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor, kept: Tensor) -> Tensor:
        x = self.table(tokens if self.batch_first else tokens.T)
        y = self.layers(x, src_key_padding_mask=~kept)
        return y if self.batch_first else y.transpose(0, 1)


class Weighted(nn.Module):
    """Attention that returns its weights, which PyTorch computes step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, 0.1)
        self.last = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, kept: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(0, 1)
        y, _ = self.attention(x, x, x, key_padding_mask=~kept, need_weights=True)
        return self.last(y + x).transpose(0, 1)


class ByHand(nn.Module):
    """Attention with a fill, a softmax and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.keys, self.last = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor, kept: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scores = (x @ self.keys(x).mT).masked_fill(~kept.unsqueeze(1), -torch.inf)
        return self.last(scores.softmax(2) @ x)


class Bert(nn.Module):
    """A small BERT of transformers."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=POSITIONS,
            attn_implementation=implementation,
        )
        self.model = BertModel(config, add_pooling_layer=False).to(torch.get_default_dtype())

    def forward(self, tokens: Tensor, kept: Tensor) -> Tensor:
        return self.model(tokens, attention_mask=kept.long()).last_hidden_state


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Encoder(batch_first=True),
    "encoder, sequence first": lambda: Encoder(batch_first=False),
    "weighted": Weighted,
    "by hand": ByHand,
    "BERT, eager": lambda: Bert("eager"),
    "BERT, sdpa": lambda: Bert("sdpa"),
}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name.startswith("BERT") else ()) for name in MODELS
]
# Losses of what is not padded, from the output (B, T, d) and where it is kept (B, T).
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first token": lambda y, _: features(y[:, 0], 1).squeeze(1),
    "product with the mask": lambda y, kept: features(y * kept.unsqueeze(2), 1).squeeze(1),
    "fill": lambda y, kept: y.square().sum(2).masked_fill(~kept, 0).sum(1),
    "where": lambda y, kept: torch.where(kept.unsqueeze(2), y, 0).square().sum((1, 2)),
    "mean": lambda y, kept: ((y * kept[:, :, None]).sum(1) / kept.sum(1, True)).square().sum(1),
    "labels": lambda y, kept: F.cross_entropy(
        y.transpose(1, 2), kept.long().masked_fill(~kept, -100), reduction="none"
    ).sum(1),
    "several": lambda y, kept: features(y * kept.unsqueeze(2), 2),
}


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and where they are kept: of full length in the first step, of any length later."""
    tokens = torch.randint(11, (SAMPLES, POSITIONS))
    lengths = torch.randint(1, POSITIONS + 1, (SAMPLES, 1)) if step else torch.tensor(POSITIONS)
    return tokens, (torch.arange(POSITIONS) < lengths).expand(SAMPLES, -1).contiguous()


def passes_of_steps(
    make_model: Callable[[], Any],
    of: Callable[[Tensor, Tensor], Tensor],
    *,
    batch_dim: Any,
    fused: bool,
) -> list[int]:
    """How many backward passes the engine makes in each step."""
    model = make_model()
    assert model.training
    engine = Engine(model, batch_dim=batch_dim, verify="never")
    counts = []
    for number in range(STEPS):
        tokens, kept = batch_of(number)
        losses = of(model(tokens, kept), kept)
        with counted_passes(losses) as passes:
            if fused:
                engine.backward(losses, lambda gramian: gramian.diagonal().clamp_min(1e-3).rsqrt())
            else:
                engine.compute_gramian(losses)
        counts.append(len(passes))
    return counts


@pytest.mark.parametrize(("batch_dim", "fused"), [("auto", False), (0, True)])
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("name", NAMES)
def test_one_pass_a_step(name: str, losses: str, fused: bool, batch_dim: Any) -> None:
    """From the third step on."""
    counts = passes_of_steps(MODELS[name], LOSSES[losses], batch_dim=batch_dim, fused=fused)
    assert counts[2:] == [1] * (STEPS - 2)


@BATCH_DIMS
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("name", NAMES)
def test_masks_that_change_are_exact(name: str, losses: str, batch_dim: Any) -> None:
    model, of = MODELS[name](), LOSSES[losses]
    engine = Engine(model, batch_dim=batch_dim, verify="never")
    for step in range(4):
        tokens, kept = batch_of(step)
        assert_exact(engine, of(model(tokens, kept), kept), model)
