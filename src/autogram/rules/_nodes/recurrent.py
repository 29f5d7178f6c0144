"""Nodes of recurrent layers: their weights, from the layer replayed step by step."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import islice

from torch import Tensor

from autogram._blocks import Block, Layout
from autogram.rules._nodes.registry import NodeInput, NodeRecipe, of_nodes
from autogram.rules._recipe import Formula
from autogram.rules._recurrence import Cell, gru_cell, lstm_cell, relu_cell, tanh_cell
from autogram.rules.recurrent import Replay

# By PyTorch's mode number: the cell, and the fields of the states that a node saves.
_OF_CUDNN: dict[int, tuple[Cell, tuple[str, ...]]] = {
    0: (relu_cell, ("hx",)),
    1: (tanh_cell, ("hx",)),
    2: (lstm_cell, ("hx", "cx")),
    3: (gru_cell, ("hx",)),
}
_OF_MKLDNN: dict[int, tuple[Cell, tuple[str, ...]]] = {2: (lstm_cell, ("hx_", "cx_"))}


@of_nodes("MkldnnRnnLayer", holds_for_each_result=True, gives_several=True)
def _mkldnn_layer(read: NodeInput) -> NodeRecipe | None:
    """The weights of one direction of one layer of ``nn.LSTM`` in float32 on a CPU.

    The results are the output at all steps and both final states. The first input is the layer's
    input. The node's flag for the order of dimensions describes the call: in a layer, time comes
    first.
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


@of_nodes("CudnnRnn", holds_for_each_result=True, gives_several=True)
def _cudnn_layers(read: NodeInput) -> NodeRecipe | None:
    """The weights of all layers of a recurrent module on a GPU.

    The results are the output at all steps, and the final states of all layers.
    """
    (cell, states), result = _OF_CUDNN[read.number("mode")], read.number_of_result
    layers, directions = read.number("num_layers"), 1 + read.number("bidirectional")
    is_random = read.number("dropout") and read.number("train") and layers > 1
    count = read.number("weight_stride0") * layers * directions
    if is_random or result > len(states) or not _are_weights(read, count):
        return None  # a replay does not know the random mask
    packed, is_batch_first = tuple(read.number("batch_sizes")), read.number("batch_first")
    shape, dims = read.node._input_metadata[0].shape, "S-"
    if not packed:
        steps, sequences = shape[1::-1] if is_batch_first else shape[:2]
        packed, dims = (sequences,) * steps, "S--" if is_batch_first else "-S-"
    dims, final = (dims, None) if result == 0 else ("-S-", result - 1)
    replay = Replay(cell, len(states), packed, directions, dims, final)
    formula = _of_weights(replay, read.positions, is_batch_first)
    return NodeRecipe(formula, ("input", *states, "weight"))


def _are_weights(read: NodeInput, count: int) -> bool:
    """Whether the inputs are some of the weights, which come after the layer's own input."""
    return all(1 <= position <= count for position in read.positions)


@lru_cache(maxsize=1024)
def _of_weights(
    replay: Replay, positions: tuple[int, ...], is_batch_first: bool = False
) -> Formula:
    """The formula of some weights. A replay gives the blocks of the states before theirs."""
    numbers = tuple([replay.n_states + position - 1 for position in positions])
    return Formula(replay.dims, partial(_chosen, replay, numbers, is_batch_first))


def _chosen(
    replay: Replay,
    numbers: tuple[int, ...],
    is_batch_first: bool,
    layout: Layout | None,
    cotangent: Tensor,
    input: Tensor,
    *tensors: Tensor,
) -> list[Block]:
    """Some of the blocks of a replay, which needs the input with time first."""
    input = input.transpose(0, 1) if is_batch_first else input
    replayed = replay.blocks(layout, cotangent, input, *tensors)
    blocks = enumerate(islice(replayed, max(numbers) + 1))
    return [block for number, block in blocks if number in numbers]
