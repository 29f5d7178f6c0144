"""Recurrent layers that are one node."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram.rules._nodes import node_recipe
from tests.unit.rules._nodes.comparing import (
    HAS_MKLDNN,
    compared,
    inputs_of,
    nodes_behind,
    operation_of,
)

pytestmark = pytest.mark.cpu
WEIGHTS = [1, 2, 3, 4]


def layers_of(x: Tensor, **options: Any) -> list[Any]:
    """The nodes of the layers of an LSTM, in single precision, of which PyTorch has the kernel."""
    module = nn.LSTM(3, 2, dtype=torch.float32, **options)
    nodes = [node for node in nodes_behind(module(x)) if operation_of(node) == "MkldnnRnnLayer"]
    assert nodes
    return nodes


@HAS_MKLDNN
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"batch_first": True}, {"bidirectional": True}, {"num_layers": 2}],
    ids=str,
)
def test_weights_of_a_layer(number: int, options: dict[str, Any]) -> None:
    """For each of the results: the output at all steps, and both final states."""
    nodes = layers_of(torch.randn(5, 4, 3, dtype=torch.float32), **options)
    assert len(nodes) == options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    weights = WEIGHTS[: 4 if options.get("bias", True) else 2]
    for node in nodes:
        assert [i for i, _ in inputs_of(node) if compared(node, i, number)] == weights


@HAS_MKLDNN
def test_a_single_sequence() -> None:
    (node,) = layers_of(torch.randn(5, 3, dtype=torch.float32))
    assert all(compared(node, position) for position in WEIGHTS)


@HAS_MKLDNN
def test_inputs_and_states_have_no_rule() -> None:
    x = torch.randn(5, 4, 3, dtype=torch.float32).requires_grad_()
    states = [torch.randn(1, 4, 2, dtype=torch.float32).requires_grad_() for _ in range(2)]
    output, _ = nn.LSTM(3, 2, dtype=torch.float32)(x, states)
    node = output.grad_fn
    found = [node_recipe("MkldnnRnnLayer", node, i) is not None for i, _ in inputs_of(node)]
    assert found == [False, True, True, True, True, False, False]


def test_other_results_of_other_nodes_have_no_rule() -> None:
    module = nn.LayerNorm(3)
    node = module(torch.randn(2, 3)).grad_fn
    assert [node_recipe("NativeLayerNorm", node, 1, result) is None for result in range(3)] == [
        False,
        True,
        True,
    ]
