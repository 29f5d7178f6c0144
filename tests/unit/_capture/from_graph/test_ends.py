"""Where the places of samples end in a graph."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram._capture.autograd.graph import nodes_behind
from autogram._capture.from_graph.ends import (
    End,
    Graph,
    MetError,
    ends_at_parameters,
    ends_of_samples,
)
from autogram._capture.places.places import Places
from autogram._capture.recording import Channel
from tests.unit.engines import batch


def graph_of(losses: Tensor, model: nn.Module) -> Graph:
    """The graph of some losses, whose nodes are in any order."""
    return Graph.of(losses, [*nodes_behind(losses)], [*model.parameters()])


def described(graph: Graph, ends: list[End]) -> list[tuple[str, int]]:
    """The ends by the names of nodes and by positions, sorted."""
    return sorted((graph.nodes[end.node].name(), x) for end in ends for x in end.positions)


def found(losses: Tensor, model: nn.Module) -> list[tuple[str, int]]:
    """The ends of the samples of some losses."""
    graph = graph_of(losses, model)
    start = Places.along(losses.shape, 0)
    return described(graph, ends_of_samples(graph, start, Channel(), 10**6))


def test_parameters_of_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    losses = model(batch(5, 3)).square().sum(1)
    layers = [
        ("AddmmBackward0", 0),
        ("AddmmBackward0", 2),
        ("MmBackward0", 1),
        ("NativeLayerNormBackward0", 1),
        ("NativeLayerNormBackward0", 2),
    ]
    assert found(losses, model) == layers
    graph = graph_of(losses, model)
    assert described(graph, ends_at_parameters(graph)) == layers


def test_what_is_computed_from_parameters() -> None:
    """For one sample, places do not end before a parameter."""
    layer = nn.Linear(3, 4)
    losses = F.linear(batch(5, 3), layer.weight / layer.weight.norm(), layer.bias).square().sum(1)
    assert found(losses, layer) == [("AddmmBackward0", 0), ("AddmmBackward0", 2)]
    graph = graph_of(losses, layer)
    assert described(graph, ends_at_parameters(graph)) == [
        ("AddmmBackward0", 0),
        ("DivBackward0", 0),
        ("LinalgVectorNormBackward0", 0),
    ]


def test_a_penalty_ends_at_the_losses() -> None:
    layer = nn.Linear(3, 1, bias=False)
    losses = layer(batch(5, 3)).flatten() + layer.weight.square().sum()
    assert found(losses, layer) == [("AddBackward0", 1), ("MmBackward0", 1)]


def test_values_that_keep_samples_apart() -> None:
    """The order of samples is read from an index, where structure alone would mix them."""
    layer = nn.Linear(3, 2, bias=False)
    losses = layer(batch(5, 3))[torch.tensor([3, 1, 0, 4, 2])].square().sum(1)
    assert found(losses, layer) == [("MmBackward0", 1)]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.Softmax])
def test_samples_that_meet(kind: type[nn.Module]) -> None:
    """Places end at the node that mixes them, which is named where rows would be large."""
    norm = nn.BatchNorm1d(4) if kind is nn.BatchNorm1d else nn.Softmax(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), norm)
    losses = model(batch(5, 3)).square().sum(1)
    (mixing,) = {name for name, _ in found(losses, model)}
    assert mixing in ("NativeBatchNormBackward0", "SoftmaxBackward0")

    channel = Channel(lambda: dict.fromkeys(model.parameters(), ""))
    recording = channel.begin()
    hidden = model[0](batch(5, 3))
    recording.note_at(hidden)
    losses = norm(hidden).square().sum(1)
    graph, start = graph_of(losses, model), Places.along(losses.shape, 0)
    elements = 5 * 12  # of the rows of the weight
    assert ends_of_samples(graph, start, channel, elements)
    with pytest.raises(MetError) as met:
        ends_of_samples(graph, start, channel, elements - 1)
    assert met.value.node.name() == mixing
