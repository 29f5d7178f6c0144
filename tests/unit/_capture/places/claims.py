"""Transfers held against what nodes do: each node is carried out for samples of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autogram._capture.autograd.graph import kind_of_node, nodes_behind
from autogram._capture.places.inference import Inference
from autogram._capture.places.places import EMPTY, SEVERAL, Places
from autogram._capture.places.probe import Edge, Prober
from autogram._capture.places.transfers.step import Road, Unreadable
from autogram._capture.places.transfers.table import joins_pieces, transfer_of
from autogram._capture.recording import Channel
from tests.hunt.samples import OpInfo, samples_of

LARGEST = 1000  # elements of a result that is looked at

Claims = Counter[tuple[str, str]]
"""How many claims about each operation have each verdict: unsound, coarse or exact."""


def read(node: Any, name: str, is_constant: bool = False, /) -> Any:
    """The tensors in a field of a node."""
    try:
        found = getattr(node, f"_saved_{name}")
    except (AttributeError, RuntimeError) as error:
        raise Unreadable(name) from error
    if found is not None and not isinstance(found, Tensor | list | tuple):
        raise Unreadable(name)  # a number
    if is_constant and (found is None or found.requires_grad):
        return None
    return found.detach() if isinstance(found, Tensor) else found


def placements(shape: tuple[int, ...]) -> Iterator[Places]:
    """Samples in order and at random along each dimension, and at random along two."""
    long = [dim for dim, size in enumerate(shape) if size > 1]
    for dim in long:
        line = [shape[dim] if d == dim else 1 for d in range(len(shape))]
        yield Places.along(shape, dim)
        yield Places.of(shape, torch.randint(-1, 4, line))
    if len(long) > 1:
        for pair in {(long[0], long[1]), (long[0], long[-1]), (long[-2], long[-1])}:
            yield Places.of(
                shape, torch.randint(-1, 4, [n if d in pair else 1 for d, n in enumerate(shape)])
            )


def result_shapes(node: Any) -> list[tuple[int, ...]]:
    """The shapes of a node's results."""
    return [tuple(metadata.shape) for metadata in node._input_metadata]


def judged(node: Any, number: int, places: Places, road: Road) -> Iterator[str]:
    """How what is claimed of each input of a node compares with what the node does.

    Nothing where the node cannot be carried out, or where its values are not finite.
    """
    prober = Prober(Channel())
    inference = Inference(road, read, prober)
    results: list[Places | None] = [None] * len(node._input_metadata)
    results[number] = places
    edges = [(i, Edge(*edge)) for i, edge in enumerate(node.next_functions) if edge[0] is not None]
    claims = inference.carried(node, results, edges)
    ones = [
        None if x is None else torch.ones(tuple(of.shape), dtype=of.dtype)
        for x, of in zip(results, node._input_metadata, strict=True)
    ]
    gradients = prober.gradients(node, ones)
    if gradients is None:
        return  # the node refuses such a cotangent
    if any(x is not None and not x.isfinite().all() for x in gradients.values()):
        return  # zero times infinity is not zero
    seen = prober.probe(node, results)
    if seen is None or inference.unknown:
        return
    for (position, edge), claim in zip(edges, claims, strict=True):
        claimed = (claim or Places.nowhere(edge.shape)).grid().expand(edge.shape)
        true = seen[0].inputs[position].grid().expand(edge.shape)
        is_wrong = (true != EMPTY) & (claimed != true) & (claimed != SEVERAL)
        is_coarse = (claimed == SEVERAL) & (true != SEVERAL) & (true != EMPTY)
        yield "unsound" if is_wrong.any() else "coarse" if is_coarse.any() else "exact"


def known_nodes(output: Any) -> Iterator[Any]:
    """The nodes behind the results of a call that are in the table."""
    leaves = torch.utils._pytree.tree_leaves(output)
    for x in leaves:
        if isinstance(x, Tensor) and x.grad_fn is not None:
            for node in nodes_behind(x):
                is_leaf = kind_of_node(type(node)).operation == "AccumulateGrad"
                if not is_leaf and (transfer_of(node) is not None or joins_pieces(node)):
                    yield node


def verdicts_of(output: Any, road: Road) -> Iterator[tuple[str, str]]:
    """The operation and a verdict, for each claim about nodes behind the results of a call."""
    for node in known_nodes(output):
        for number, shape in enumerate(result_shapes(node)):
            if 0 < torch.Size(shape).numel() <= LARGEST:
                for places in placements(shape):
                    for verdict in judged(node, number, places, road):
                        yield kind_of_node(type(node)).operation, verdict


def claims_of(operator: OpInfo, most: int, road: Road) -> Claims:
    """Those about the nodes of an operator, for its first sample inputs."""
    counts: Claims = Counter()
    for sample in samples_of(operator, most):
        output = operator(sample.input, *sample.args, **sample.kwargs)
        counts.update(verdicts_of(output, road))
    return counts
