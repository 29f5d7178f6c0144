"""One backward pass through the activations, past every tap that the losses depend on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from autogram._capture.autograd.batching import batched
from autogram._capture.autograd.graph import nodes_behind
from autogram._capture.autograd.passes import Pass
from autogram._capture.limit import is_out_of_memory
from autogram._capture.recording import Channel, Receiver
from autogram._capture.uses import Use
from autogram._errors import AutogramError

R = TypeVar("R", bound=Receiver)


def visit(
    channel: Channel,
    losses: Tensor,
    cotangents: Tensor,
    start: Callable[[], R],
    *,
    is_batchable: bool = True,
    retain_graph: bool = True,
    is_step: bool = False,
) -> R:
    """Shows a receiver the cotangent of every use.

    No gradient of a parameter is computed on the way. Several cotangents go through one batched
    pass; where an operation has no batching rule, or a wrong one, they go one by one.

    Args:
        channel: The channel of the taps.
        losses: The tensor to differentiate.
        cotangents: ``(k, *losses)``.
        start: Makes a receiver. It is called again if a pass fails half-way and another begins.
        is_batchable: Whether all cotangents may go in one pass.
        retain_graph: Whether the graph is kept. If not, it is freed as the pass goes on, provided
            that there is a single cotangent: of several, a pass may fail, and another begin.
        is_step: Whether the pass stands for the user's, as :class:`Pass` says.

    Returns:
        The receiver, after it was called with each use, what its tap saved, and its cotangent of
        shape ``(k, *output)``.

    Raises:
        FreedGraphError: An earlier backward pass has freed the graph.
        UnsupportedError: A pass inside of it adds to gradients.
        Exception: What the receiver has raised, after the pass has run to its end.
    """
    if len(cotangents) == 1:
        receiver = start()
        current = Pass(channel, receiver, is_step=is_step)
        current.differentiate(losses, [channel.anchor], cotangents[0], retain_graph=retain_graph)
        return receiver
    if is_batchable:
        try:
            receiver = start()
            current = Pass(channel, receiver, hidden=len(cotangents), is_step=is_step)
            batched(partial(_differentiate, current, losses), cotangents, nodes_behind(losses))
        except AutogramError:
            raise
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            # An operation on the path cannot be batched (`.item()`, NumPy, …)
        else:
            return receiver
    receiver = start()
    _visit_one_by_one(channel, losses, cotangents, receiver, is_step=is_step)
    return receiver


def _visit_one_by_one(
    channel: Channel, losses: Tensor, cotangents: Tensor, receiver: Receiver, *, is_step: bool
) -> None:
    """One pass for each cotangent, of which all are kept until the last."""
    shown: dict[Use, tuple[tuple[Tensor, ...], dict[int, Tensor]]] = {}
    for k, cotangent in enumerate(cotangents):

        def collect(use: Use, saved: tuple[Tensor, ...], g: Tensor, k: int = k) -> None:
            shown.setdefault(use, (saved, {}))[1][k] = g[0]

        # In memory of its own, from the start of which `as_strided_scatter` would read it.
        _differentiate(Pass(channel, collect, is_step=is_step), losses, cotangent.clone())
    for use, (saved, found) in shown.items():
        zero = torch.zeros_like(next(iter(found.values())))
        receiver(use, saved, torch.stack([found.get(k, zero) for k in range(len(cotangents))]))


def _differentiate(current: Pass, losses: Tensor, cotangent: Tensor) -> Tensor:
    """Runs a pass from the losses to the taps, and returns a tensor, as functions under vmap do."""
    current.differentiate(losses, [current.channel.anchor], cotangent)
    return cotangent
