"""Many vector-Jacobian products through one piece of a graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._capture.autograd.batching import batched
from autogram._capture.autograd.graph import in_dense, is_any_tap, nodes_from
from autogram._capture.autograd.passes import Pass
from autogram._capture.limit import is_out_of_memory
from autogram._capture.recording import Channel
from autogram._errors import AutogramError

Inputs = tuple[Tensor, ...] | tuple[GradientEdge, ...]


def many_vjps(
    channel: Channel,
    output: GradientEdge,
    inputs: Inputs,
    cotangents: Tensor,
    *,
    is_batchable: bool,
) -> list[Tensor | None]:
    """Vector-Jacobian products of one output with respect to some inputs, up to the nearest taps.

    Args:
        channel: The channel of the taps.
        output: The edge that the cotangents are of.
        inputs: Tensors or edges.
        cotangents: ``(n, *output)``.
        is_batchable: Whether all may go in one pass, where PyTorch can do so.

    Returns:
        For each input, ``(n, *input)``, or ``None`` where the output does not depend on it.
    """
    if is_batchable and cotangents.shape[0] > 1:
        try:
            return _vmapped(channel, output, inputs, cotangents)
        except AutogramError:
            raise
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            # An operation without a batching rule, or with a wrong one: one by one.
    # Each in memory of its own, from the start of which `as_strided_scatter` would read it.
    single = [_vjp(channel, output, inputs, g.clone()) for g in cotangents]
    return [_stack(found) for found in zip(*single, strict=True)]


def _vmapped(
    channel: Channel, output: GradientEdge, inputs: Inputs, cotangents: Tensor
) -> list[Tensor | None]:
    """All cotangents in one pass."""
    used: list[int] = []

    def differentiate(g: Tensor) -> tuple[Tensor, ...]:
        found = _vjp(channel, output, inputs, g)
        used[:] = [i for i, x in enumerate(found) if x is not None]
        return tuple(x for x in found if x is not None)  # vmap takes no None

    ends = {x.node if isinstance(x, GradientEdge) else get_gradient_edge(x).node for x in inputs}
    nodes = nodes_from(output.node, lambda node: node in ends or is_any_tap(node))
    by_input = dict(zip(used, batched(differentiate, cotangents, nodes), strict=True))
    return [by_input.get(i) for i in range(len(inputs))]


def _vjp(
    channel: Channel, output: GradientEdge, inputs: Inputs, cotangent: Tensor
) -> tuple[Tensor | None, ...]:
    """One vector-Jacobian product."""
    found = Pass(channel, is_blocked=True).differentiate(output, inputs, cotangent)
    return tuple([None if x is None else in_dense(x) for x in found])


def _stack(found: tuple[Tensor | None, ...]) -> Tensor | None:
    """What all cotangents give, where they give something."""
    present = [x for x in found if x is not None]
    return torch.stack(present) if present else None
