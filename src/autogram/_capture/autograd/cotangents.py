"""Many cotangents of one output: in one batched pass, or one by one where that would be wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._capture.autograd.graph import in_dense, nodes_behind, shown_by
from autogram._capture.autograd.passes import Pass
from autogram._capture.limit import is_out_of_memory
from autogram._capture.recording import Channel, Receiver
from autogram._errors import AutogramError

# Nodes whose batching rule is wrong in torch 2.13, and in which cases, as `make batching` finds by
# comparing it with a loop. A further rule that is wrong belongs here, and nowhere else.
_WRONG: dict[str, Callable[[Any], bool]] = {
    # Where only the cotangent is batched.
    "CdistBackward0": lambda _: True,
    # Of a tensor without dimensions: the hidden one is rolled. Only then, or where all elements
    # are rolled as one row, there are no dimensions to roll along.
    "RollBackward0": lambda node: not getattr(node, "_saved_dims", ()),
    # Where the mask is larger than the tensor, and as large as there are cotangents.
    "MaskedSelectBackward0": lambda _: True,
}

Inputs = tuple[Tensor, ...] | tuple[GradientEdge, ...]
R = TypeVar("R", bound=Receiver)
K = TypeVar("K")


def visit(
    channel: Channel,
    losses: Tensor,
    cotangents: Tensor,
    start: Callable[[], R],
    *,
    retain_graph: bool = True,
    is_step: bool = False,
) -> R:
    """Shows a receiver the cotangent of every use, and computes no gradient of a parameter.

    Args:
        channel: That of the taps.
        losses: What is differentiated.
        cotangents: ``(k, *losses)``.
        start: Makes a receiver. It is called again if a pass fails half-way and another begins.
        retain_graph: Whether the graph is kept. If not, it is freed as the pass goes on, provided
            that there is a single cotangent: of several, a pass may fail, and another begin.
        is_step: Whether the pass stands for the user's, as :class:`Pass` says.

    Returns:
        The receiver, after it was called with each use, what its tap saved, and its cotangent
        ``(k, *output)``.
    """
    anchors = [channel.anchor]
    receiver = start()
    if len(cotangents) == 1:
        current = Pass(channel, receiver, is_step=is_step)
        current.differentiate(losses, anchors, cotangents[0], retain_graph=retain_graph)
        return receiver
    if channel.is_batchable:
        batched = Pass(channel, receiver, hidden=len(cotangents), is_step=is_step)

        def show(cotangent: Tensor) -> dict[Any, Tensor]:
            batched.differentiate(losses, anchors, cotangent)
            return {}

        if _together(show, cotangents, nodes_behind(losses)) is not None:
            return receiver
        receiver = start()
    tensors: dict[Any, tuple[Tensor, ...]] = {}

    def collect(cotangent: Tensor) -> dict[Any, Tensor]:
        found: dict[Any, Tensor] = {}

        def receive(use: Any, saved: tuple[Tensor, ...], shown: Tensor) -> None:
            tensors.setdefault(use, saved)
            found[use] = shown[0]

        Pass(channel, receive, is_step=is_step).differentiate(losses, anchors, cotangent)
        return found

    for use, shown in _one_by_one(collect, cotangents).items():
        receiver(use, tensors[use], shown)
    return receiver


def many_vjps(
    channel: Channel, output: GradientEdge, inputs: Inputs, cotangents: Tensor
) -> list[Tensor | None]:
    """Vector-Jacobian products of one output with respect to some inputs, up to the nearest taps.

    Args:
        channel: The channel of the taps.
        output: What the cotangents ``(n, *output)`` are of.
        inputs: Where to, of which each has a result ``(n, *input)``, or ``None``.
        cotangents: ``(n, *output)``.
    """

    def vjp(cotangent: Tensor) -> dict[int, Tensor]:
        found = Pass(channel, is_blocked=True).differentiate(output, inputs, cotangent)
        return {i: in_dense(x) for i, x in enumerate(found) if x is not None}

    products = None
    if channel.is_batchable and len(cotangents) > 1:
        edges = [x if isinstance(x, GradientEdge) else get_gradient_edge(x) for x in inputs]
        ends = {edge.node for edge in edges}
        nodes = nodes_behind(output, lambda node: node in ends or shown_by(node))
        products = _together(vjp, cotangents, nodes)
    if products is None:
        products = _one_by_one(vjp, cotangents)
    return [products.get(i) for i in range(len(inputs))]


def is_batchable(nodes: Iterable[Any]) -> bool:
    """Whether several cotangents may go through all of these nodes of a graph together."""
    return not any(_WRONG.get(type(node).__name__, lambda _: False)(node) for node in nodes)


def _together(
    function: Callable[[Tensor], dict[K, Tensor]], cotangents: Tensor, nodes: Iterable[Any]
) -> dict[K, Tensor] | None:
    """``function`` of each cotangent, stacked, by one pass; or ``None`` if they must go one by one.

    The pass goes through no others than the ``nodes``.
    """
    # The search for anomalies reads values, which a batched pass hides.
    is_searched = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    if is_searched or not is_batchable(nodes):
        return None
    try:
        with warnings.catch_warnings():
            # Addressed to those who write operations, not to those who run them.
            warnings.filterwarnings("ignore", "There is a performance drop because", UserWarning)
            # Randomness occurs where a checkpoint computes again, from a seed that it restores. In
            # vmap, dropout of a transposed tensor draws another mask from this seed (torch 2.13).
            return torch.vmap(function, randomness="error")(cotangents)
    except AutogramError:
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return None  # an operation on the way cannot be batched (`.item()`, NumPy, …)


def _one_by_one(
    function: Callable[[Tensor], dict[K, Tensor]], cotangents: Tensor
) -> dict[K, Tensor]:
    """The same by a pass for each, with zeros where one has no result."""
    # Each in memory of its own, from the start of which `as_strided_scatter` would read it.
    parts = [function(cotangent.clone()) for cotangent in cotangents]
    likes = {key: x for part in parts for key, x in part.items()}
    return {
        key: torch.stack([part[key] if key in part else torch.zeros_like(x) for part in parts])
        for key, x in likes.items()
    }
