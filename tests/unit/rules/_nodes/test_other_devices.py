"""Rules for nodes that other devices make, with stand-ins that save the same."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from autogram.rules._nodes import node_recipe
from tests.unit._blocks.rows import Routed
from tests.unit.rules._nodes.comparing import compared


def parameter(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def sizes_of(tensors: Sequence[Tensor]) -> list[Any]:
    return [SimpleNamespace(shape=x.shape, dtype=x.dtype) for x in tensors]


def stand_in(name: str, results: Sequence[Tensor], *inputs: Tensor, **saved: Any) -> Any:
    """A node of some kind, which computes what autograd does."""

    def carry_out(_: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [(x, g) for x, g in zip(results, cotangents, strict=True) if g is not None]
        of, given = zip(*pairs, strict=True)
        return torch.autograd.grad(of, inputs, given, retain_graph=True, allow_unused=True)

    fields: dict[str, Any] = {"__call__": carry_out, "name": lambda _: name}
    for field, value in saved.items():
        fields[f"_saved_{field}"] = value
        if isinstance(value, (Tensor, list)):  # PyTorch has lists of tensors, tuples of numbers
            fields[f"_raw_saved_{field}"] = value
    node = type(f"{name}Backward0", (), fields)()
    node._input_metadata = sizes_of(results)
    edges = [SimpleNamespace(_input_metadata=sizes_of([x])) for x in inputs]
    node.next_functions = tuple([(edge, 0) for edge in edges])
    return node


def linear_of_others() -> Any:
    x, weight, bias = parameter(3, 5, 2), parameter(4, 2), parameter(4)
    result = F.linear(x, weight, bias)
    return stand_in("Linear", [result], x, weight, bias, input=x.detach(), weight=weight.detach())


def rms_norm_of_a_gpu() -> Any:
    x, weight = parameter(3, 5, 4), parameter(4)
    inverse = x.detach().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    result = F.rms_norm(x, (4,), weight, 1e-5)
    saved = {"input": x.detach(), "result1": inverse, "normalized_shape": (4,)}
    return stand_in("FusedRmsNorm", [result], x, weight, **saved)


def batch_norm_of_a_gpu(name: str) -> Any:
    x, weight, bias = parameter(3, 4, 5), parameter(4), parameter(4)
    result = F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)
    mean, inverse = x.detach().mean((0, 2)), x.detach().var((0, 2), correction=0)
    saved = {"result1": mean, "result2": inverse.add(1e-5).rsqrt(), "input": x.detach()}
    return stand_in(name, [result], x, weight, bias, training=True, epsilon=1e-5, **saved)


def convolution_of_others() -> Any:
    x, weight, bias = parameter(2, 4, 6), parameter(6, 2, 3), parameter(6)
    result = F.conv1d(x, weight, bias, 2, 1, 1, 2)
    saved = {"stride": (2,), "padding": (1,), "dilation": (1,), "groups": 2, "transposed": False}
    return stand_in("ConvolutionOverrideable", [result], x, weight, bias, input=x.detach(), **saved)


@pytest.mark.parametrize(
    ("make", "positions"),
    [
        (linear_of_others, [1, 2]),
        (rms_norm_of_a_gpu, [1]),
        (partial(batch_norm_of_a_gpu, "CudnnBatchNorm"), [1, 2]),
        (partial(batch_norm_of_a_gpu, "MiopenBatchNorm"), [1, 2]),
        (convolution_of_others, [1, 2]),
    ],
)
def test_nodes_of_other_devices(make: Callable[[], Any], positions: list[int]) -> None:
    node = make()
    assert [i for i in range(len(node.next_functions)) if compared(node, i)] == positions


def test_a_missing_field_is_an_unknown_case() -> None:
    """Nodes of other versions of PyTorch may save other tensors and numbers."""
    x, weight, bias = parameter(3, 2), parameter(4, 2), parameter(4)
    result = F.linear(x, weight, bias)
    assert node_recipe("Linear", stand_in("Linear", [result], x, weight, bias), 1) is None
    assert node_recipe("Addmm", stand_in("Addmm", [result], bias, x, weight, alpha=1), 0) is None
    assert node_recipe("Embedding", stand_in("Embedding", [result], weight), 0) is None


STEPS, SEQUENCES = 4, 3
MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
RECURRENT = [
    ("LSTM", {}),
    ("LSTM", {"batch_first": True, "bidirectional": True}),
    ("LSTM", {"num_layers": 2, "proj_size": 1}),
    ("GRU", {"bidirectional": True, "num_layers": 2}),
    ("GRU", {"bias": False, "batch_first": True}),
    ("RNN_TANH", {"num_layers": 2, "dropout": 0.5}),
    ("RNN_RELU", {}),
]


def layers_of_a_gpu(name: str, x: Tensor | PackedSequence, **options: Any) -> Any:
    """The node of all layers of a module, for sequences of equal lengths or packed ones."""
    kind, *nonlinearity = name.split("_")
    if nonlinearity:
        options["nonlinearity"] = nonlinearity[0].lower()
    module = getattr(nn, kind)(3, 2, **options).eval()
    is_lstm, is_packed = kind == "LSTM", isinstance(x, PackedSequence)
    layers, weights = len(module.all_weights), list(module.parameters())
    units = [module.proj_size or 2, 2][: 1 + is_lstm]
    states = [torch.randn(layers, SEQUENCES, n) for n in units]
    given = (x.data if is_packed else x).requires_grad_()
    output, final = module(x, tuple(states) if is_lstm else states[0])
    saved = {
        "mode": MODES[name],
        "num_layers": module.num_layers,
        "bidirectional": module.bidirectional,
        "batch_first": module.batch_first and not is_packed,
        "dropout": module.dropout,
        "train": module.training,
        "weight_stride0": len(weights) // layers,
        "batch_sizes": tuple(x.batch_sizes.tolist()) if is_packed else (),
        "input": given.detach(),
        "weight": [x.detach() for x in weights],
        **dict(zip(("hx", "cx"), states, strict=False)),
    }
    results = output.data if is_packed else output, *(final if is_lstm else [final])
    return stand_in("CudnnRnn", results, given, *weights, **saved)


@pytest.mark.parametrize(("name", "options"), RECURRENT, ids=str)
def test_recurrent_layers_of_a_gpu(name: str, options: dict[str, Any]) -> None:
    """The weights of all layers and directions, for each result."""
    x = torch.randn(STEPS, SEQUENCES, 3)
    x = x.transpose(0, 1) if options.get("batch_first") else x
    node = layers_of_a_gpu(name, x, **options)
    weights = range(1, len(node.next_functions))
    for number in range(len(node._input_metadata)):
        assert all(compared(node, position, number) for position in weights)
    assert node_recipe("CudnnRnn", node, 0) is None


@pytest.mark.parametrize(("name", "options"), RECURRENT, ids=str)
def test_packed_sequences_on_a_gpu(name: str, options: dict[str, Any]) -> None:
    """Of which each is a sample, whose rows come step by step."""
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(STEPS, SEQUENCES, 3), torch.tensor([4, 2, 2]))
    node = layers_of_a_gpu(name, x, **options)
    owners = torch.cat([torch.arange(n) for n in x.batch_sizes.tolist()])
    for position in range(1, len(node.next_functions)):
        assert compared(node, position, 0, [None, Routed(0, SEQUENCES, owners)]) == 2
        assert all(compared(node, position, i) for i in range(1, len(node._input_metadata)))


def test_a_random_mask_cannot_be_replayed() -> None:
    node = layers_of_a_gpu("GRU", torch.randn(STEPS, SEQUENCES, 3), num_layers=2, dropout=0.5)
    assert node_recipe("CudnnRnn", node, 1) is not None
    type(node)._saved_train = True
    assert node_recipe("CudnnRnn", node, 1) is None
