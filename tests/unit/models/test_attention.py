"""Attention of PyTorch in every form: modules with their options, and the function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from tests.unit.checks import (
    COUPLED,
    SEVERAL,
    ModelFactory,
    Objectives,
    assert_gramian_is_exact,
)
from tests.unit.engines import assert_exact, per_sample
from tests.unit.networks import AmongOthers, call, trained

B, T, D = 3, 4, 4

SETTINGS = [
    pytest.param(lambda module: module, COUPLED, id="alone coupled"),
    pytest.param(AmongOthers, SEVERAL, id="among others (B, K)"),
]
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 4, [False, True, False, True], [True, False, False, False]])


class Attention(nn.Module):
    """``nn.MultiheadAttention``, whose weights are a part of the output if they are asked for.

    Queries, keys and values are the input; across, they are made of it and differ in their sizes.
    """

    def __init__(
        self,
        *,
        cross: bool = False,
        call: dict[str, Any] | None = None,
        batch_first: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self.attention = trained(nn.MultiheadAttention(D, 2, batch_first=batch_first, **arguments))
        self.cross, self.call = cross, call or {}

    def forward(self, x: Tensor) -> Tensor:
        key, value = x, x
        if self.cross:
            key = x[:, 1:, : self.attention.kdim].cos()
            value = torch.cat([x, x], 2)[:, 1:, 1 : self.attention.vdim + 1].sin()
        inputs = (x, key, value)
        if not self.attention.batch_first:
            inputs = (part.transpose(0, 1) for part in inputs)
        output, weights = self.attention(*inputs, **self.call)
        if not self.attention.batch_first:
            output = output.transpose(0, 1)
        if weights is None:
            return output
        return torch.cat([output.flatten(1), weights.flatten(1)], 1)


FLOAT_MASK = torch.linspace(-1, 1, T * T).view(T, T).double()
MHA: dict[str, dict[str, Any]] = {
    "self": {},
    "self, without weights": {"call": {"need_weights": False}},
    "self, weights of heads": {"call": {"average_attn_weights": False}},
    "self, without biases": {"bias": False},
    "dropout": {"dropout": 0.3},
    "dropout, without weights": {"dropout": 0.3, "call": {"need_weights": False}},
    "cross, other sizes": {"cross": True, "kdim": 3, "vdim": 5},
    "cross, same size": {"cross": True, "kdim": D, "vdim": D},
    "cross, without weights, dropout": {
        **{"cross": True, "kdim": 3, "vdim": 5, "dropout": 0.3},
        "call": {"need_weights": False},
    },
    "learned key and value": {"add_bias_kv": True},
    "learned key and value, without weights": {
        "add_bias_kv": True,
        "call": {"need_weights": False},
    },
    "zero attention": {"add_zero_attn": True},
    "learned key and value, zero attention, cross, dropout": {
        **{"add_bias_kv": True, "add_zero_attn": True, "cross": True, "kdim": 3, "vdim": 5},
        "dropout": 0.3,
    },
    "padding": {"call": {"key_padding_mask": PADDING}},
    "padding, without weights": {"call": {"key_padding_mask": PADDING, "need_weights": False}},
    "padding, learned key and value, zero attention": {
        **{"add_bias_kv": True, "add_zero_attn": True},
        "call": {"key_padding_mask": PADDING},
    },
    "mask": {"call": {"attn_mask": CAUSAL}},
    "mask of numbers": {"call": {"attn_mask": FLOAT_MASK}},
    "mask for each sample and head": {
        "call": {"attn_mask": FLOAT_MASK.sin().expand(B * 2, T, T)},
    },
    "causal": {"call": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}},
}


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize("name", MHA)
def test_multihead_attention(
    name: str, wrap: Callable[[nn.Module], nn.Module], objectives: Objectives
) -> None:
    x = torch.randn(B, T, D)
    assert_gramian_is_exact(lambda: wrap(Attention(**MHA[name])), x, objectives=objectives)


@pytest.mark.parametrize("name", MHA)
def test_sequence_first(name: str) -> None:
    def make_model() -> nn.Module:
        return AmongOthers(Attention(batch_first=False, **MHA[name]))

    assert_gramian_is_exact(make_model, torch.randn(B, T, D), objectives=SEVERAL)


def test_multihead_attention_without_a_batch() -> None:
    """Queries, keys and values of one sample, whose positions give the losses."""
    model = nn.MultiheadAttention(D, 2)
    positions = Objectives("positions", lambda output: output[0].square().sum(1), None)
    x = torch.randn(T, D)
    assert_gramian_is_exact(lambda: model, x, x, x, objectives=positions)


def _layer(kind: type[nn.Module], **arguments: Any) -> nn.Module:
    arguments = {"dropout": 0.2, "batch_first": True, **arguments}
    return trained(kind(D, 2, dim_feedforward=6, **arguments))


class WithMemory(nn.Module):
    """A decoder, whose memory is made of the input as well."""

    def __init__(self, decoder: nn.Module, batch_first: bool = True, **call: Any) -> None:
        super().__init__()
        self.decoder, self.batch_first, self.call = decoder, batch_first, call

    def forward(self, x: Tensor) -> Tensor:
        x, memory = x, x[:, 1:].sin()
        if self.batch_first:
            return self.decoder(memory, x, **self.call)
        return self.decoder(memory.transpose(0, 1), x.transpose(0, 1), **self.call).transpose(0, 1)


class Swapped(nn.Module):
    """A decoder layer as a function of memory and target."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, memory: Tensor, x: Tensor, **call: Any) -> Tensor:
        return self.decoder(x, memory, **call)


class SequenceFirst(nn.Module):
    """A layer on the transposed input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Masked(nn.Module):
    """An encoder with padding."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=PADDING)


def _encoder(layers: int = 2, **arguments: Any) -> nn.Module:
    return trained(nn.TransformerEncoder(_layer(nn.TransformerEncoderLayer, **arguments), layers))


def _decoder(**arguments: Any) -> nn.Module:
    return Swapped(
        trained(nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer, **arguments), 2))
    )


def _transformer(**arguments: Any) -> nn.Module:
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    return _layer(nn.Transformer, **sizes, **arguments)


TRANSFORMERS: dict[str, ModelFactory] = {
    "encoder layer": lambda: _layer(nn.TransformerEncoderLayer),
    "encoder layer, norm first, gelu": lambda: _layer(
        nn.TransformerEncoderLayer, norm_first=True, activation="gelu"
    ),
    "encoder layer, without biases": lambda: _layer(nn.TransformerEncoderLayer, bias=False),
    "encoder layer, sequence first": lambda: SequenceFirst(
        _layer(nn.TransformerEncoderLayer, batch_first=False)
    ),
    "encoder": _encoder,
    "encoder with padding": lambda: Masked(_encoder()),
    "decoder": lambda: WithMemory(_decoder(norm_first=True)),
    "decoder, causal": lambda: WithMemory(_decoder(), tgt_mask=CAUSAL, tgt_is_causal=True),
    "transformer": lambda: WithMemory(_transformer()),
    "transformer, norm first, gelu": lambda: WithMemory(
        _transformer(norm_first=True, activation="gelu")
    ),
    "transformer, sequence first": lambda: WithMemory(
        _transformer(batch_first=False), batch_first=False
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("objectives", [SEVERAL, COUPLED], ids=repr)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer(name: str, objectives: Objectives, is_training: bool) -> None:
    assert_gramian_is_exact(
        lambda: TRANSFORMERS[name]().train(is_training),
        torch.randn(B, T, D),
        objectives=objectives,
    )


class Headed(nn.Module):
    """An encoder, some of it frozen, and a head."""

    def __init__(self, encoder: nn.Module, is_frozen: Callable[[str], bool]) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(D, 2)
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(not is_frozen(name))

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding))


FROZEN: dict[str, Callable[[str], bool]] = {
    "all": lambda _: True,
    "attention": lambda name: "self_attn" in name,
    "all but the attention": lambda name: "self_attn" not in name,
    "all but one bias": lambda name: not name.endswith("linear2.bias"),
    "first layer": lambda name: name.startswith("layers.0"),
}


@pytest.mark.parametrize("has_padding", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts(frozen: str, is_training: bool, has_padding: bool) -> None:
    """In evaluation mode, PyTorch has a faster way through layers that need no gradient.

    It takes it only where no mode is active, so the losses agree to rounding, and the Gramian is
    that of the losses as they were computed.
    """
    model = Headed(_encoder(), FROZEN[frozen]).train(is_training)
    padding = PADDING if has_padding else None
    x = torch.randn(B, T, D)
    with torch.random.fork_rng(devices=[]):
        plain = model(x, padding)
    engine = Engine(model)
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            output = model(x, padding)
        kept = torch.ones(B, T, dtype=torch.bool) if padding is None else ~padding
        torch.testing.assert_close(output[kept], plain[kept])
        assert_exact(engine, per_sample(output), model)


def sdpa(query: Tensor, x: Tensor, **arguments: Any) -> Tensor:
    """Attention to keys and values made of the input, with two heads of width two."""
    key = x.unflatten(2, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, key.sin(), **arguments).flatten(1)


def heads(x: Tensor) -> Tensor:
    return x.cos().unflatten(2, (2, 2)).transpose(1, 2)


def mask_of(x: Tensor, bias: Tensor) -> Tensor:
    return bias + x.mean((1, 2)).view(-1, 1, 1, 1)


SDPA: dict[str, ModelFactory] = {
    "bias": call(lambda x, bias: sdpa(heads(x), x, attn_mask=bias), (T, T)),
    "bias for each head": call(lambda x, bias: sdpa(heads(x), x, attn_mask=bias), (2, T, T)),
    "bias expanded over the batch": call(
        lambda x, bias: sdpa(heads(x), x, attn_mask=bias.expand(len(x), 2, T, T)), (1, 2, T, T)
    ),
    "bias and dropout": call(
        lambda x, bias: sdpa(heads(x), x, attn_mask=bias, dropout_p=0.4), (T, T)
    ),
    "bias from a table": call(
        lambda x, table: sdpa(
            heads(x), x, attn_mask=table[(torch.arange(T)[:, None] - torch.arange(T)) + T]
        ),
        (2 * T,),
    ),
    "bias that depends on the sample": call(
        lambda x, bias: sdpa(heads(x), x, attn_mask=mask_of(x, bias)), (T, T)
    ),
    "queries": call(lambda x, query: sdpa(query.expand(len(x), -1, -1, -1), x), (2, 3, 2)),
    "queries, dropout": call(
        lambda x, query: sdpa(query.expand(len(x), -1, -1, -1), x, dropout_p=0.4), (2, 3, 2)
    ),
    "queries, causal": call(
        lambda x, query: sdpa(query.expand(len(x), -1, -1, -1), x, is_causal=True), (2, T, 2)
    ),
    "queries without a batch": call(lambda x, query: sdpa(query, x), (2, 3, 2)),
    "queries of a batch of one": call(lambda x, query: sdpa(query, x), (1, 2, 3, 2)),
    "queries and bias": call(
        lambda x, query, bias: sdpa(query.expand(len(x), -1, -1, -1), x, attn_mask=bias),
        (2, 3, 2),
        (3, T),
    ),
    "scaled by hand": call(
        lambda x, query: sdpa(query.expand(len(x), -1, -1, -1), x, scale=0.3), (2, 3, 2)
    ),
    "keys and values": call(
        lambda x, key: F.scaled_dot_product_attention(
            heads(x), key.expand(len(x), -1, -1, -1), key.expand(len(x), -1, -1, -1).sin()
        ),
        (2, 3, 2),
    ),
    "grouped queries": call(
        lambda x, query: sdpa(query.expand(len(x), -1, -1, -1), x, enable_gqa=True), (4, 3, 2)
    ),
    "multi-head attention with learned queries": lambda: WithQueries(),
}


class WithQueries(nn.Module):
    """Learned queries that read the input, as in a pooling head."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 2, D))
        self.attention = trained(nn.MultiheadAttention(D, 2, batch_first=True, dropout=0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.queries.expand(len(x), -1, -1), x, x)[0]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention(
    name: str, wrap: Callable[[nn.Module], nn.Module], objectives: Objectives
) -> None:
    assert_gramian_is_exact(lambda: wrap(SDPA[name]()), torch.randn(B, T, D), objectives=objectives)
