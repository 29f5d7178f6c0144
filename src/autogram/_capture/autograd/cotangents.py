"""Many cotangents of one output: in one batched pass, or one by one where batching is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autogram._capture.autograd.graph import arriving, edge_of, in_dense, is_tap_of, nodes_behind
from autogram._capture.autograd.passes import Pass
from autogram._capture.limit import is_out_of_memory
from autogram._capture.recording import Channel, Receiver
from autogram.errors import AutogramError

# Nodes without a batching rule, or with one that is wrong in torch 2.13, and the cases. `make
# batching` finds wrong rules by comparing them with a loop. All exceptions belong here, and
# nowhere else.
_UNBATCHED: dict[str, Callable[[Any], bool]] = {
    # PyTorch refuses them, but only when a surrounding checkpoint has run again in the batched
    # pass. For this run, Dynamo compiles a graph that it reuses when passes go one by one.
    "CompiledFunctionBackward": lambda _: True,
    # Wrong if only the cotangent is batched.
    "CdistBackward0": lambda _: True,
    # Wrong for a tensor without dimensions: the hidden one is rolled. Such a call has no `dims`;
    # nor has a call that rolls all elements as one row.
    "RollBackward0": lambda node: not getattr(node, "_saved_dims", ()),
    # Wrong if the mask is larger than the tensor, and as large as the number of cotangents.
    "MaskedSelectBackward0": lambda _: True,
}

Inputs = tuple[Tensor, ...] | tuple[GradientEdge, ...]
Show = Callable[..., None]
"""Runs a pass from some losses with a cotangent, optionally with ``retain_graph``."""
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
    show: Show | None = None,
) -> R:
    """Shows a receiver each use's cotangent, without computing gradients of parameters.

    Args:
        channel: The channel of the taps.
        losses: The tensor that is differentiated.
        cotangents: ``(k, *losses)``.
        start: Makes a receiver. It is called again if a pass fails half-way and another begins.
        retain_graph: Whether to keep the graph. Several cotangents keep it in any case, because a
            batched pass may fail.
        is_step: Whether the pass replaces the user's; see :class:`Pass`.
        show: Runs a pass that shows its uses; by default, taps show them.

    Returns:
        The receiver, after it was shown each use, with its tap's saved tensors and its cotangent.
    """
    show = show or partial(_past_taps, channel)
    receiver = start()
    if len(cotangents) == 1:
        current = Pass(channel, receiver, is_step=is_step)
        show(current, losses, cotangents[0], retain_graph=retain_graph)
        return receiver
    if channel.is_batchable:
        batched = Pass(channel, receiver, hidden=len(cotangents), is_step=is_step)

        def show_all(cotangent: Tensor) -> dict[Any, Tensor]:
            show(batched, losses, cotangent, retain_graph=True)
            return {}

        if _together(show_all, cotangents, nodes_behind(losses)) is not None:
            batched.show_kept()
            return receiver
        receiver = start()
    tensors: dict[Any, tuple[Tensor, ...]] = {}
    parts: list[dict[Any, Tensor]] = []  # for each pass

    def receive(use: Any, saved: tuple[Tensor, ...], shown: Tensor) -> None:
        tensors.setdefault(use, saved)
        parts[-1][use] = shown[0]

    for cotangent in cotangents[:-1]:
        parts.append({})
        current = Pass(channel, receive, is_step=is_step)
        show(current, losses, cotangent.clone(), retain_graph=True)  # a copy, as in `_one_by_one`

    def receive_all(use: Any, saved: tuple[Tensor, ...], shown: Tensor) -> None:
        none = torch.zeros_like(shown[0])
        receiver(use, saved, torch.stack([*[part.pop(use, none) for part in parts], shown[0]]))

    # Sharded parameters are gathered for a pass, and empty after it.
    last = Pass(channel, receive_all, is_step=is_step)
    show(last, losses, cotangents[-1].clone(), retain_graph=True)
    for use in dict.fromkeys(use for part in parts for use in part):
        some = next(part[use] for part in parts if use in part)
        receive_all(use, tensors[use], torch.zeros_like(some).unsqueeze(0))
    return receiver


def _past_taps(
    channel: Channel, current: Pass, losses: Tensor, cotangent: Tensor, *, retain_graph: bool
) -> None:
    """Runs a pass through the taps of an engine, which show their uses."""
    current.differentiate(losses, [channel.anchor], cotangent, retain_graph=retain_graph)


def many_vjps(
    channel: Channel, output: GradientEdge, inputs: Inputs, cotangents: Tensor
) -> list[Tensor | None]:
    """Vector-Jacobian products of one output with respect to some inputs, up to the nearest taps.

    For cotangents ``(n, *output)``, it returns ``(n, *input)`` for each input, or ``None`` if the
    output does not depend on it.
    """
    edges = [x if isinstance(x, GradientEdge) else edge_of(x, output) for x in inputs]

    def vjp(cotangent: Tensor) -> dict[int, Tensor]:
        gradients = Pass(channel, is_blocked=True).differentiate(output, edges, cotangent)
        return {i: in_dense(x) for i, x in enumerate(gradients) if x is not None}

    ends = {edge.node for edge in edges}
    nodes = nodes_behind(output, lambda node: node in ends or is_tap_of(channel, node))
    return carried_out(channel, vjp, cotangents, nodes, len(inputs))


def vjps_of_node(
    channel: Channel,
    output: GradientEdge,
    inputs: Sequence[GradientEdge],
    cotangents: Tensor,
    carry_out: Callable[[Sequence[Tensor | None]], Any] | None = None,
) -> list[Tensor | None]:
    """The same for one result of a single node, which leads directly to the inputs.

    ``carry_out`` takes a cotangent for each result and returns a gradient for each input. By
    default, the node is called, which must not be that of a custom autograd Function.
    """
    node: Any = output.node
    count = len(node._input_metadata)

    def vjp(cotangent: Tensor) -> dict[int, Tensor]:
        cotangents = [cotangent if i == output.output_nr else None for i in range(count)]
        gradients = node(*cotangents) if carry_out is None else carry_out(cotangents)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        totals: dict[int, Tensor] = {}
        for gradient, edge in zip(gradients, node.next_functions, strict=True):
            if gradient is None or edge not in places:
                continue
            gradient = arriving(gradient, *edge)
            i = places[edge]
            totals[i] = totals[i] + gradient if i in totals else gradient
        return totals

    places = {(edge.node, edge.output_nr): i for i, edge in enumerate(inputs)}
    return carried_out(channel, vjp, cotangents, [node], len(inputs))


def is_batchable(nodes: Iterable[Any]) -> bool:
    """Whether several cotangents may go through all of these nodes of a graph together."""
    return not any(_UNBATCHED.get(type(node).__name__, lambda _: False)(node) for node in nodes)


def carried_out(
    channel: Channel,
    function: Callable[[Tensor], dict[int, Tensor]],
    cotangents: Tensor,
    nodes: Iterable[Any],
    count: int,
) -> list[Tensor | None]:
    """Applies a function to each cotangent through some nodes, at once where that is possible.

    The function returns its results by number, below ``count``.
    """
    results = None
    with torch.no_grad():
        if channel.is_batchable and len(cotangents) > 1:
            results = _together(function, cotangents, nodes)
        if results is None:
            results = _one_by_one(function, cotangents)
    return [results.get(i) for i in range(count)]


def _together(
    function: Callable[[Tensor], dict[K, Tensor]], cotangents: Tensor, nodes: Iterable[Any]
) -> dict[K, Tensor] | None:
    """The results of one batched pass through some nodes, or ``None`` if it cannot be batched."""
    # Anomaly detection reads values, which a batched pass hides.
    is_searched = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    if is_searched or not is_batchable(nodes):
        return None
    try:
        with warnings.catch_warnings():
            # This warning is for authors of operators, not for users of engines.
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
    """The same with one pass for each cotangent, and zeros where a pass has no result."""
    # Copies, because the backward pass of `as_strided_scatter` is wrong for a part of a tensor.
    parts = [function(cotangent.clone()) for cotangent in cotangents]
    likes = {key: x for part in parts for key, x in part.items()}
    return {
        key: torch.stack([part[key] if key in part else torch.zeros_like(x) for part in parts])
        for key, x in likes.items()
    }
