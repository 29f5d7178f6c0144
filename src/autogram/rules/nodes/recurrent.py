"""Nodes of recurrent layers: their weights, from the layer replayed step by step."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import islice

from torch import Tensor

from autogram._blocks import Block, Layout
from autogram.rules._recipe import Formula
from autogram.rules._recurrence import lstm_cell
from autogram.rules.nodes.registry import NodeInput, NodeRecipe, of_nodes
from autogram.rules.recurrent import Replay

_LSTM = 2  # among PyTorch's numbers of modes
_STATES = ("hx_", "cx_")


@of_nodes("MkldnnRnnLayer", holds_for_each_result=True)
def _mkldnn_layer(read: NodeInput) -> NodeRecipe | None:
    """The weights of one direction of one layer of ``nn.LSTM`` in float32 on a CPU.

    The results are the output at all steps and both final states. Each weight replays the layer.
    """
    has_biases, result = read.number("has_biases"), read.number_of_result
    weights = [f"weight{i}" for i in range(4 if has_biases else 2)]
    is_padded = not read.number("batch_sizes")
    if read.number("mode") != _LSTM or not is_padded or not 1 <= read.position <= len(weights):
        return None
    steps, sequences, _ = read.node._input_metadata[0].shape
    dims, final = ("-S-", None) if result == 0 else ("S-", result - 1)
    sizes, is_reversed = (sequences,) * steps, bool(read.number("reverse"))
    replay = Replay(lstm_cell, len(_STATES), sizes, 1, dims, final, is_reversed)
    formula = _of_weight(replay, len(_STATES) + read.position - 1)
    return NodeRecipe(formula, ("input", *_STATES, *weights))


@lru_cache(maxsize=1024)
def _of_weight(replay: Replay, number: int) -> Formula:
    return Formula(replay.dims, partial(_block, replay, number))


def _block(
    replay: Replay, number: int, layout: Layout | None, *tensors: Tensor
) -> tuple[Block, ...]:
    """One of the blocks of a layer."""
    return tuple(islice(replay.blocks(layout, *tensors), number, number + 1))
