"""Nodes of recurrent layers: their weights, from the layer replayed step by step."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import islice

from torch import Tensor

from autogram._blocks import Block, Layout
from autogram.rules._recipe import Formula
from autogram.rules._recurrence import gru_cell, lstm_cell, relu_cell, tanh_cell
from autogram.rules.nodes.registry import NodeInput, NodeRecipe, of_nodes
from autogram.rules.recurrent import Replay

# By PyTorch's numbers of modes: the cell, and the states that a node has saved.
_OF_CUDNN = {
    0: (relu_cell, ("hx",)),
    1: (tanh_cell, ("hx",)),
    2: (lstm_cell, ("hx", "cx")),
    3: (gru_cell, ("hx",)),
}
_OF_MKLDNN = {2: (lstm_cell, ("hx_", "cx_"))}


@of_nodes("MkldnnRnnLayer", holds_for_each_result=True, gives_several=True)
def _mkldnn_layer(read: NodeInput) -> NodeRecipe | None:
    """The weights of one direction of one layer of ``nn.LSTM`` in float32 on a CPU.

    The results are the output at all steps and both final states, and the first input is the
    layer's own. What the node says of the order of dimensions is that of the call: in a layer,
    time comes first.
    """
    mode, packed = read.number("mode"), read.number("batch_sizes")
    weights = [f"weight{i}" for i in range(4 if read.number("has_biases") else 2)]
    if mode not in _OF_MKLDNN or packed or not _are_weights(read, len(weights)):
        return None
    (cell, states), result = _OF_MKLDNN[mode], read.number_of_result
    steps, sequences, _ = read.node._input_metadata[0].shape
    dims, final = ("-S-", None) if result == 0 else ("S-", result - 1)
    sizes, is_reversed = (sequences,) * steps, bool(read.number("reverse"))
    replay = Replay(cell, len(states), sizes, 1, dims, final, is_reversed)
    return NodeRecipe(_of_weights(replay, read.positions), ("input", *states, *weights))


def _are_weights(read: NodeInput, count: int) -> bool:
    """Whether the inputs are some of the weights, which come behind the layer's own input."""
    return all(1 <= position <= count for position in read.positions)


@lru_cache(maxsize=1024)
def _of_weights(replay: Replay, positions: tuple[int, ...]) -> Formula:
    """The formula of some weights, before whose blocks a replay gives those of the states."""
    numbers = tuple([replay.n_states + position - 1 for position in positions])
    return Formula(replay.dims, partial(_chosen, replay, numbers))


def _chosen(
    replay: Replay, numbers: tuple[int, ...], layout: Layout | None, *tensors: Tensor
) -> list[Block]:
    """Some of the blocks that a replay gives."""
    blocks = enumerate(islice(replay.blocks(layout, *tensors), max(numbers) + 1))
    return [block for number, block in blocks if number in numbers]
