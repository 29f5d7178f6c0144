"""Recurrent layers and cells: each result, each arrangement of layers and of samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from autogram import Engine, MixedSamplesError
from autogram._capture.use import FallbackUse
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
from tests.unit.engines import assert_exact, batch, per_sample
from tests.unit.networks import trained
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact

B, T, WIDTH, UNITS = 3, 4, 2, 3

MakeLayer = Callable[..., nn.RNNBase]
Read = Callable[[list[Tensor]], Tensor]  # from the results, samples first, to a model's output


def relu(*args: Any, **kwargs: Any) -> nn.RNN:
    return nn.RNN(*args, nonlinearity="relu", **kwargs)


def projected(*args: Any, **kwargs: Any) -> nn.LSTM:
    return nn.LSTM(*args, proj_size=2, **kwargs)


def together(results: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten(1) for x in results], 1)


def output(results: list[Tensor]) -> Tensor:
    return results[0]


def hidden(results: list[Tensor]) -> Tensor:
    return results[1]


def last(results: list[Tensor]) -> Tensor:
    """The hidden state, or the cell state of an LSTM."""
    return results[-1]


def last_step(results: list[Tensor]) -> Tensor:
    return results[0][:, -1]


class Net(nn.Module):
    """A recurrent layer between samples that come first and results in which they do."""

    def __init__(self, layer: nn.RNNBase, read: Read = together) -> None:
        super().__init__()
        self.layer = layer
        self.read = read

    def forward(self, x: Tensor, *states: Any) -> Tensor:
        result, final = self.layer(x if self.layer.batch_first else x.transpose(0, 1), *states)
        finals = [final] if isinstance(final, Tensor) else list(final)
        result = result if self.layer.batch_first else result.transpose(0, 1)
        return self.read([result, *(x.transpose(0, 1) for x in finals)])


LAYERS = [
    pytest.param(nn.RNN, id="RNN"),
    pytest.param(relu, id="RNN with ReLU"),
    pytest.param(nn.LSTM, id="LSTM"),
    pytest.param(projected, id="LSTM with projection"),
    pytest.param(nn.GRU, id="GRU"),
]
ARRANGEMENTS = [
    pytest.param({}, id="one layer"),
    pytest.param({"bias": False, "batch_first": True}, id="batch first, no bias"),
    pytest.param({"num_layers": 2, "batch_first": True}, id="two layers"),
    pytest.param({"bidirectional": True, "batch_first": True}, id="both directions"),
    pytest.param({"num_layers": 2, "bidirectional": True}, id="two layers, both directions"),
    pytest.param({"num_layers": 3, "bidirectional": True, "bias": False}, id="three, no bias"),
]
READS = [
    pytest.param(together, id="every result"),
    pytest.param(output, id="output"),
    pytest.param(hidden, id="hidden state"),
    pytest.param(last, id="last state"),
    pytest.param(last_step, id="last step"),
]


@pytest.fixture(autouse=True)
def no_fallback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by vector-Jacobian products are right, too, and would hide a rule that is not used."""
    if "fallback" not in request.keywords:

        def refuse(*_: Any) -> None:
            raise AssertionError("a call was left to the fallback")

        monkeypatch.setattr(FallbackUse, "contributions", refuse)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("make", LAYERS)
def test_layers(make: MakeLayer, arrangement: dict[str, Any], read: Read) -> None:
    assert_gramian_is_exact(
        lambda: trained(Net(make(WIDTH, UNITS, **arrangement), read)), torch.randn(B, T, WIDTH)
    )


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize("make", LAYERS)
def test_settings(make: MakeLayer, wrap: Wrap, objectives: Objectives) -> None:
    def model() -> nn.Module:
        return Net(make(WIDTH, UNITS, num_layers=2, bidirectional=True))

    assert_rule_is_exact(model, torch.randn(B, T, WIDTH), wrap, objectives)
