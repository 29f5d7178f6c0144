"""Sequences of new lengths: no call makes a further pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram._capture.autograd.graph import kind_of_node
from tests.unit.engines import assert_exact_in_one_pass, batch, per_sample

SAMPLES = 7
# None of the sizes below is a multiple of the samples, which could be there.
LENGTHS = (9, 11, 12, 9, 18, 19, 11)


def normalized(h: Tensor) -> Tensor:
    """Root mean squares, as many models write them out."""
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3)


def shifted(h: Tensor) -> Tensor:
    """Relative positions by a view of padded scores with other strides."""
    scores = F.pad(h @ h.mT, (1, 0))
    n, rows, columns = scores.shape
    return scores.view(n, columns, rows)[:, 1:].reshape(n, rows, rows).softmax(-1) @ h


# From hidden activations (samples, length, 6) to others.
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean": lambda h: h * h.mean(1, keepdim=True),
    "a mean of all": lambda h: h * h.mean((1, 2), keepdim=True),
    "root mean squares": normalized,
    "the last position": lambda h: h[:, h.shape[1] - 1],
    "the first half": lambda h: h[:, : h.shape[1] // 2],
    "the second half": lambda h: h[:, h.shape[1] // 2 :],
    "padded to a length": lambda h: F.pad(h, (0, 0, 0, 24 - h.shape[1])),
    "repeated": lambda h: h + h.mean(1, keepdim=True).repeat(1, h.shape[1], 1),
    "normalised over all positions": lambda h: F.layer_norm(h, h.shape[1:]),
    "group normalisation": lambda h: F.group_norm(h.mT, 2).mT,
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h),
    "pooled to a length": lambda h: F.adaptive_avg_pool1d(h.mT, 3).mT,
    "interpolated": lambda h: F.interpolate(h.mT, scale_factor=2.0).mT,
    "chunks": lambda h: torch.cat(h.split([1, h.shape[1] - 1], 1)[::-1], 1),
    "relative positions": shifted,
}


class Model(nn.Module):
    """Two layers around a part."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.LazyLinear(6)
        self._part = part

    def forward(self, x: Tensor) -> Tensor:
        """Maps samples to samples."""
        return self.second(self._part(self.first(x).tanh()).flatten(0, -2)).view(len(x), -1)


@pytest.mark.parametrize("name", PARTS)
def test_new_lengths_cost_no_pass(name: str) -> None:
    model = Model(PARTS[name])
    with torch.no_grad():
        model(batch(SAMPLES, LENGTHS[0], 3))
    engine = Engine(model, verify="never")
    for length in LENGTHS:
        losses = per_sample(model(batch(SAMPLES, length, 3)))
        assert_exact_in_one_pass(engine, losses, model)


def test_lengths_of_transcripts_are_data() -> None:
    """Of a loss by connectionist temporal classification: no value decides."""
    model = nn.Linear(3, 6)
    engine = Engine(model, verify="never")
    for _ in range(4):
        scores = model(batch(SAMPLES, 9, 3)).log_softmax(-1).transpose(0, 1)
        targets = torch.randint(1, 6, (SAMPLES, 4))
        inside = torch.randint(7, 10, (SAMPLES,))
        lengths = torch.randint(1, 4, (SAMPLES,))
        losses = F.ctc_loss(scores, targets, inside, lengths, reduction="none")
        assert_exact_in_one_pass(engine, losses, model)


def test_sizes_that_attention_saves_on_a_gpu() -> None:
    """Its nodes hold the lengths of queries and keys, which are no part of the structure."""
    kind = kind_of_node(torch._C._functions.ScaledDotProductFlashAttentionBackward0)
    names = [[reader.__self__.__name__ for reader in of] for of in (kind.sizes, kind.arguments)]
    others = ["_saved_dropout_p", "_saved_is_causal", "_saved_scale"]
    assert names == [["_saved_max_k", "_saved_max_q"], others]
