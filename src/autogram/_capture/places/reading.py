"""Reads saved values of a graph's nodes that decide where samples are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._capture.autograd.passes import Pass
from autogram._capture.autograd.recomputing import Recomputing, checkpointed_parts
from autogram._capture.places.transfers.step import Unreadable
from autogram._capture.recording import Channel
from autogram._undo import undone

_Field = tuple[Any, str]  # a node, and a name


class DecidingValue(NamedTuple):
    """A saved tensor of a node, or one of several, whose values have decided."""

    node: int
    field: str
    entry: int | None


class ValueReader:
    """Reads nodes' saved tensors, once, and notes them.

    Args:
        nodes: All nodes of the graph, in the order of a walk.
        channel: The channel of the graph's uses: a read may run a checkpointed part again.
    """

    def __init__(self, nodes: Sequence[Any], channel: Channel) -> None:
        self.numbers = {node: number for number, node in enumerate(nodes)}
        self._nodes = nodes
        self._channel = channel
        self._again: Recomputing | None = None
        self._values: dict[_Field, Any] = {}
        self._copies: dict[_Field, Any] = {}  # copies on the CPU

    def read(self, node: Any, field: str, is_constant: bool = False, /) -> Any:
        """The tensors in a field of a node: see :class:`.step.Read`."""
        key = node, field
        if key not in self._values:
            saved = self._saved(node, field, is_constant)
            if is_constant and (saved is None or saved.requires_grad):
                return None
            self._values[key] = saved
        if key not in self._copies:
            self._copy([key])
        return self._copies[key]

    def fetch(self, values: Iterable[DecidingValue]) -> None:
        """Copies to the CPU the values that decided in an earlier graph, and decide in this one."""
        for of in values:
            self.value(of)
        self._copy([*self._values])

    def value(self, of: DecidingValue) -> Tensor:
        """This graph's tensor for a value that decided in an earlier one, on its device."""
        key = self._nodes[of.node], of.field
        if key not in self._values:
            self._values[key] = self._saved(*key)
        value: Tensor = self._values[key] if of.entry is None else self._values[key][of.entry]
        return value

    def constants(self) -> dict[DecidingValue, Tensor]:
        """Copies of all tensors that were read."""
        constants = {}
        for (node, field), value in self._values.items():
            several = [(None, value)] if isinstance(value, Tensor) else enumerate(value)
            for entry, x in several:
                if x is not None:
                    constants[DecidingValue(self.numbers[node], field, entry)] = x.detach().clone()
        return constants

    def release(self) -> None:
        """Frees the results of checkpointed parts that ran for reading."""
        self._values.clear()
        self._copies.clear()
        if self._again is not None:
            self._again.release()

    def _copy(self, fields: Sequence[_Field]) -> None:
        """Copies the contents of some fields, with one wait for each device."""
        values = {key: self._values[key] for key in fields}
        entries = [x for of in values.values() for x in (of if isinstance(of, tuple) else (of,))]
        copies: dict[Any, Any] = {None: None}
        copies.update(copied_to_cpu([x for x in entries if x is not None]))
        for key, of in values.items():
            is_several = isinstance(of, tuple)
            self._copies[key] = [copies[x] for x in of] if is_several else copies[of]

    def _saved(self, node: Any, field: str, is_constant: bool = False) -> Any:
        """The saved tensors in a field of a node."""
        if not hasattr(node, f"_raw_saved_{field}"):
            raise Unreadable(field)
        try:
            if not checkpointed_parts([node]):
                return getattr(node, f"_saved_{field}")
        except RuntimeError as error:  # changed in place, or freed
            raise Unreadable(field) from error
        if is_constant and sum(child is not None for child, _ in node.next_functions) > 1:
            return None  # recomputed tensors do not show that they require a gradient
        if self._channel.before_pass is not None:
            raise Unreadable(field)  # the part may wait for other processes
        if self._again is None:
            self._again = Recomputing(checkpointed_parts(self._nodes))
        current = Pass(self._channel, is_alone=True)
        return self._again.call(current, lambda: getattr(node, f"_saved_{field}"))


@contextmanager
def reading(nodes: Sequence[Any], channel: Channel) -> Iterator[ValueReader]:
    """A block in which saved tensors of a graph's nodes are read."""
    reader = ValueReader(nodes, channel)
    with undone(reader.release):
        yield reader


def copied_to_cpu(tensors: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """The tensors themselves if on the CPU, otherwise copies, with one wait for each device."""
    copies = {x: x.detach() for x in tensors if x.device.type == "cpu"}
    for device in {x.device for x in tensors if x not in copies}:
        there = [x for x in tensors if x.device == device]
        copies.update(zip(there, copied_together(there), strict=True))
    return copies


def copied_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors of one device to the CPU, in one transfer."""
    order = sorted(tensors, key=Tensor.element_size, reverse=True)  # so that all are aligned
    parts = [x.detach().contiguous().view(-1).view(torch.uint8) for x in order]
    pieces = torch.cat(parts).cpu().split([part.numel() for part in parts])
    copies = {id(x): piece for x, piece in zip(order, pieces, strict=True)}
    return [copies[id(x)].view(x.dtype).view(x.shape) for x in tensors]
