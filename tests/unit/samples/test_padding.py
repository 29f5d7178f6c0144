"""Samples of different lengths in one batch, and samples that have no gradient at all."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from autogram import Engine
from tests.unit.checks import irregular
from tests.unit.engines import assert_exact, batch

LENGTHS = [[4, 4, 4, 4], [1, 2, 3, 4], [4, 1, 1, 2], [1, 1, 1, 1]]
BATCH_FIRST = pytest.mark.parametrize("batch_first", [True, False])


def padding(lengths: list[int], positions: int = 4) -> Tensor:
    """Where a batch ``(B, T)`` is padded."""
    return torch.arange(positions) >= torch.tensor(lengths).unsqueeze(1)


def masked_losses(output: Tensor, padded: Tensor) -> Tensor:
    """A loss for each sample of ``(B, T, d)``, from the positions that are not padded."""
    per_position = (output + 0.3 * output.sin()) @ irregular(output.shape[2])
    return per_position.masked_fill(padded, 0).sum(1)


def encoder(batch_first: bool) -> nn.TransformerEncoder:
    """Two layers of a transformer, with dropout."""
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@BATCH_FIRST
@pytest.mark.parametrize("is_training", [True, False])
def test_padded_attention(batch_first: bool, is_training: bool) -> None:
    """As many samples as positions and as features; other lengths in each batch."""
    model = encoder(batch_first).train(is_training)
    engine = Engine(model, batch_dim=0)
    for lengths in LENGTHS:
        padded, x = padding(lengths), batch(4, 4, 4)
        x = x if batch_first else x.transpose(0, 1)
        output = model(x, src_key_padding_mask=padded)
        output = output if batch_first else output.transpose(0, 1)
        assert_exact(engine, masked_losses(output, padded), model)


@BATCH_FIRST
def test_padded_targets(batch_first: bool) -> None:
    """A decoder with a causal mask, and padding in what it reads and in what it writes."""
    model = nn.TransformerDecoderLayer(4, 2, 5, dropout=0.1, batch_first=batch_first)
    engine = Engine(model, batch_dim=0)
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for lengths in LENGTHS:
        padded, x, y = padding(lengths), batch(4, 4, 4), batch(4, 4, 4)
        inputs = (x, y) if batch_first else (x.transpose(0, 1), y.transpose(0, 1))
        output = model(
            *inputs,
            tgt_mask=causal,
            tgt_key_padding_mask=padded,
            memory_key_padding_mask=padded.flip(0),
        )
        output = output if batch_first else output.transpose(0, 1)
        assert_exact(engine, masked_losses(output, padded), model)


class Tagger(nn.Module):
    """A recurrent layer on packed sequences, and what becomes of each position."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.table = nn.Embedding(7, 3, padding_idx=0)
        self.recurrent = nn.LSTM(3, 4, batch_first=batch_first, bidirectional=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        x = self.table(tokens if self.batch_first else tokens.T)
        y = rnn.pack_padded_sequence(
            x, torch.tensor(lengths, device="cpu"), self.batch_first, False
        )
        outputs, _ = rnn.pad_packed_sequence(self.recurrent(y)[0], self.batch_first)
        return self.head(outputs)


@BATCH_FIRST
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_padded_recurrence(batch_first: bool) -> None:
    """Padding tokens have an embedding without a gradient, and no state."""
    model = Tagger(batch_first)
    engine = Engine(model)
    for lengths in LENGTHS[:3]:
        padded = padding(lengths)
        output = model(torch.randint(1, 7, (4, 4)).masked_fill(padded, 0), lengths)
        output = output if batch_first else output.transpose(0, 1)
        assert_exact(engine, masked_losses(output, padded), model)


@pytest.mark.parametrize("empty", [[0], [3], [1, 2], [0, 1, 3]])
def test_samples_that_are_padding_alone(empty: list[int]) -> None:
    """Rows of zeros, exactly, whatever the network computes of them."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    engine = Engine(model, batch_dim=0)
    for _ in range(3):
        lengths = [0 if i in empty else 3 for i in range(4)]
        losses = masked_losses(model(torch.randint(7, (4, 4))), padding(lengths))
        gramian = engine.compute_gramian(losses)
        assert not gramian[empty].any()
        assert not gramian[:, empty].any()
        assert_exact(engine, losses, model)


def test_positions_without_a_label() -> None:
    """Labels that are ignored: of some positions, of all positions of one sample."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5))
    engine = Engine(model, batch_dim=0)
    for _ in range(3):
        labels = torch.randint(5, (4, 4)).masked_fill(torch.rand(4, 4) < 0.5, -100)
        labels[1] = -100
        logits = model(batch(4, 4, 4)).transpose(1, 2)
        losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100).sum(1)
        assert_exact(engine, losses, model)
        assert not engine.compute_gramian(losses)[1].any()


def test_pooled_over_what_is_not_padded() -> None:
    """A mean over each sample's own positions, behind attention that sees no padding."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = encoder(batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            y = self.body(x, src_key_padding_mask=padded)
            kept = (~padded).to(y.dtype).unsqueeze(2)
            return self.head((y * kept).sum(1) / kept.sum(1))

    model = Pooled()
    engine = Engine(model, batch_dim=0)
    for lengths in LENGTHS:
        losses = model(batch(4, 4, 4), padding(lengths)).square().sum(1)
        assert_exact(engine, losses, model)
