"""Finds the sample of each element of a tensor, in the gradients of per-sample losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autogram._capture.autograd.graph import nodes_behind
from autogram._capture.places.finding import infer
from autogram._capture.places.places import Places
from autogram._capture.places.probe import Edge
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram.errors import MixedSamplesError


def owners_of(objectives: Objectives, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sample numbers of each element of some tensors, with size 1 along constant dimensions.

    The numbers hold for any values. Elements whose gradient is zero may have any number.

    Raises:
        MixedSamplesError: An element belongs to several samples, or its sample is unknown.
        UnsupportedError: The graph contains a nested tensor.
    """
    losses, layout = objectives.losses, objectives.layout
    if layout is None or not losses.numel():
        return [_none_of(tensor) for tensor in tensors]
    nodes = list(nodes_behind(losses))
    edges = [Edge(edge.node, edge.output_nr) for edge in map(get_gradient_edge, tensors)]
    behind = set(nodes)
    if not all(edge.node in behind for edge in edges):
        return [_none_of(tensor) for tensor in tensors]  # the pass will raise NotConnectedError
    root = Edge(losses.grad_fn, losses.output_nr)
    start = Places.along(losses.shape, layout.dim)
    finding, in_graph = infer(root, start, nodes, edges, Channel())
    if in_graph.is_mixed:
        node = nodes[finding.mixing]
        shape = tuple(node._input_metadata[0].shape)
        raise MixedSamplesError(_message(f"`{node.name()}`, of a result of shape {shape}, does it"))
    each = zip(tensors, in_graph.edges.values(), strict=True)
    return [
        _none_of(tensor) if places is None else places.grid().clamp(min=0).to(tensor.device)
        for tensor, places in each
    ]


def _none_of(tensor: Tensor) -> Tensor:
    """Assigns all elements to one sample."""
    return torch.zeros((1,) * tensor.dim(), dtype=torch.int64, device=tensor.device)


def _message(cause: str) -> str:
    """The error message."""
    return (
        "The samples meet between the representation and the losses: an element of the "
        f"representation belongs to several samples, or its sample is unknown. {cause}. Batch "
        "normalisation in training mode mixes samples, and so does a representation that all "
        "samples share. Pass `batch_dim=None` (exact for any losses, a pass for each loss)."
    )
