"""The tail: what happens between the last recorded calls and the losses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from autogram._capture.batching import WRONG_NODES
from autogram._capture.graph import nodes_behind
from autogram._capture.picking import picked_by_node
from autogram._capture.recording import Channel
from autogram._capture.tap import is_tap_of
from autogram._capture.use import Use


@dataclass(frozen=True)
class Tail:
    """The operations between the losses and the first taps, as their graph shows them.

    The recorder does not see them, and they decide too where the samples lie.
    """

    structure: int
    """A hash of the operations."""
    fingerprint: int
    """The same, with numbers such as the sizes of a view, and index tensors that pick samples."""
    is_batchable: bool
    """Whether a backward pass through it may be batched."""
    leaves: tuple[Tensor, ...]
    """Tensors that the losses reach past every tap, such as parameters in a penalty."""
    uses: tuple[Use, ...]
    """The uses whose taps the losses reach first."""

    @classmethod
    def of(cls, channel: Channel, losses: Tensor) -> Tail:
        """The tail of some losses."""
        names: list[tuple[str, tuple[int, ...]]] = []
        details: list[Any] = []
        leaves: list[Tensor] = []
        uses: list[Use] = []
        for node in nodes_behind(losses, lambda node: is_tap_of(channel, node)):
            names.append((node.name(), tuple(place for _, place in node.next_functions)))
            details.append(picked_by_node(node))
            values = (getattr(node, field) for field in _numbers(node.__class__))
            details.extend(value for value in values if isinstance(value, (int, tuple)))
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaves.append(variable)
            elif is_tap_of(channel, node):
                uses.append(node.use)
        return cls(
            hash(tuple(names)),
            hash((*names, *details)),
            WRONG_NODES.isdisjoint(name for name, _ in names),
            tuple(leaves),
            tuple(uses),
        )


@lru_cache(maxsize=1024)
def _numbers(node: type) -> tuple[str, ...]:
    """The fields of a kind of node that hold sizes, dimensions or shifts."""
    words = {"dim", "dim0", "dim1", "dims", "sizes", "shifts", "start", "end", "step", "index"}
    fields = (field for field in dir(node) if field.startswith("_saved_"))
    return tuple(field for field in fields if field.split("_")[-1] in words)
