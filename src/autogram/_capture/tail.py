"""The tail: what happens between the last recorded calls and the losses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from autogram._capture.batching import WRONG_NODES_WHEN_BATCHED
from autogram._capture.recording import Channel
from autogram._capture.tap import is_tap_of

_INDEX_NODES = {"IndexBackward0", "IndexSelectBackward0", "TakeBackward0", "TakeAlongDimBackward0"}


@dataclass(frozen=True)
class Tail:
    """The operations between the losses and the first taps, as their graph shows them.

    The recorder does not see them, and they decide too where the samples lie.
    """

    structure: int
    """A hash of the operations."""
    fingerprint: int
    """The same, with their numbers, such as the sizes of a view."""
    has_indices: bool
    """Whether samples may be picked by an index tensor, which no fingerprint can tell."""
    is_batchable: bool
    """Whether a backward pass through it may be batched."""

    @classmethod
    def of(cls, channel: Channel, losses: Tensor) -> Tail:
        """The tail of some losses."""
        names: list[str] = []
        numbers: list[Any] = []
        pending, seen = [losses.grad_fn], set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            names.append(node.name())
            if is_tap_of(channel, node):
                continue
            numbers.extend(getattr(node, field) for field in _numbers(type(node)))
            pending.extend(following for following, _ in node.next_functions)
        return cls(
            hash(tuple(names)),
            hash((*names, *numbers)),
            not _INDEX_NODES.isdisjoint(names),
            WRONG_NODES_WHEN_BATCHED.isdisjoint(names),
        )


@lru_cache(maxsize=1024)
def _numbers(node: type) -> tuple[str, ...]:
    """The fields of a kind of node that hold sizes, dimensions or shifts."""
    words = {"dim", "dim0", "dim1", "dims", "sizes", "shifts", "start", "end", "step", "index"}
    fields = (field for field in dir(node) if field.startswith("_saved_"))
    return tuple(field for field in fields if field.split("_")[-1] in words)
