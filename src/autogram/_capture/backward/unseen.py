"""Unseen uses: parameters that are used where nothing is recorded, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from torch.autograd.graph import get_gradient_edge

from autogram._capture.recording import Channel, Recording
from autogram._capture.samples.survey import Survey
from autogram._capture.tracked import track_parameter
from autogram._capture.uses import FallbackUse, Use

Unseen = Literal["rows", "error"]

_MOST_NAMED = 8


def use_in_tail(channel: Channel, survey: Survey) -> FallbackUse | None:
    """The losses as a use of the parameters that they reach past every tap.

    A penalty on the weights, a call of another method than the forward, a gradient that is
    differentiated again, or a forward pass from before the engine was made use parameters where
    nothing is recorded.

    Args:
        channel: The channel of the engine.
        survey: The graph behind the losses.
    """
    losses, leaves = survey.losses, survey.leaves_of_tail
    if not leaves:
        return None
    names = channel.parameters(leaves)
    reads = tuple(track_parameter(p) for p in leaves if p in names)
    if not reads:
        return None
    recording = Recording(channel, names, is_batchable=channel.is_batchable)
    sources = tuple(tracked.sources[0] for tracked in reads)
    shape, edge = tuple(losses.shape), get_gradient_edge(losses)
    return FallbackUse(
        recording, -1, "the losses", shape, reads, losses.dtype, edge, sources, is_seen=False
    )


def describe_unseen(uses: Sequence[Use], objectives: int) -> str:
    """Which parameters are used unseen, where, what that costs, and what to do about it."""
    places: dict[str, list[str]] = {}
    for use in uses:
        for parameter in dict.fromkeys(p for tracked in use.reads for p in tracked.sources):
            elements = objectives * prod(parameter.shape)
            text = f"`{use.recording.names[parameter]}` ({elements} elements)"
            places.setdefault(use.function, []).append(text)
    listed = "; ".join(
        f"in {place}, {', '.join(names[:_MOST_NAMED])}"
        + f" and {len(names) - _MOST_NAMED} others" * (len(names) > _MOST_NAMED)
        for place, names in places.items()
    )
    return (
        "Some parameters are used where calls are not recorded. What they contribute is explicit "
        f"rows of J, by {objectives} vector-Jacobian products (one for each objective) through "
        f"each place: {listed}. To save that, use them in the `forward` of a module that is given "
        "to `Engine` before it runs, and register a rule for a custom autograd Function "
        "(`autogram.rules.register_rule`)."
    )
