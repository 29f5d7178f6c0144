"""Reads a node's saved tensors, or calls the node, where a checkpoint may run a part again for it.

A checkpoint recomputes a part's saved tensors once for each backward pass, or for each group of
passes. Recomputed tensors that nobody reads stay in memory as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint

from autogram._capture.autograd.graph import kind_of_node
from autogram._capture.autograd.passes import Pass

T = TypeVar("T")

# Passes of one group run a part once. Old versions have no groups: each read runs it.
_Group: Any = getattr(checkpoint, "GraphExecGroup", nullcontext)


def checkpointed_parts(nodes: Iterable[Any]) -> dict[Any, None]:
    """The parts of checkpoints, each once, that run again if some nodes' saved tensors are read.

    It misses parts of a call whose result was a slice changed in place: its node hides them.
    """
    saved = [
        getattr(node, field, None)
        for node in nodes
        for field in ("_raw_saved_tensors", *_raw_fields(node))
    ]
    entries = [x for of in saved for x in (of if isinstance(of, tuple | list) else (of,))]
    parts = [_part(getattr(entry, "unpack_hook", None)) for entry in entries]
    return {part: None for part in parts if part is not None}


def _raw_fields(node: Any) -> list[str]:
    """The names of the fields that hold a node's saved tensors in packed form."""
    return [f"_raw{field}" for field in kind_of_node(type(node)).tensors]


def _part(unpack: Any) -> Any:
    """PyTorch's record of the part that runs again to unpack a tensor, or ``None``."""
    if "checkpoint" not in getattr(unpack, "__module__", ""):
        return None
    names, cells = unpack.__code__.co_freevars, unpack.__closure__ or ()
    return dict(zip(names, [cell.cell_contents for cell in cells], strict=True)).get("frame")


@dataclass
class Lent:
    """The saved tensors of one node, read once, for any number of uses of the node.

    A checkpoint allows one read of each tensor in a pass: after that, it must be given back.
    """

    node: Any
    values: dict[str, Any]
    """By field: a tensor, or several of them."""
    _entries: list[tuple[Any, Any, Tensor]]
    """For each checkpointed tensor: the part, the tensor's placeholder, and the tensor."""

    @classmethod
    def of(cls, node: Any) -> Lent:
        """Reads a node's saved tensors now."""
        values, entries = {}, []
        for field in kind_of_node(type(node)).tensors:
            values[field] = value = getattr(node, field)
            raw, several = getattr(node, f"_raw{field}"), isinstance(value, tuple | list)
            pairs = zip(raw, value, strict=True) if several else ((raw, value),)
            for entry, tensor in pairs:
                part = _part(getattr(entry, "unpack_hook", None))
                if part is not None and tensor is not None:
                    entries.append((part, entry.data, tensor))
        return cls(node, values, entries)

    def __getattr__(self, field: str) -> Any:
        try:
            return self.__dict__["values"][field]
        except KeyError:
            return getattr(self.__dict__["node"], field)

    def give_back(self) -> None:
        """Lets the node read its tensors once more, in the running pass."""
        current = torch._C._current_graph_task_id()
        if hasattr(_Group, "_get_current_group"):
            current = _Group._get_current_group() or current
        for part, holder, tensor in self._entries:
            part.is_recomputed[current] = True
            holder.handles[current] = handle = checkpoint._Handle()
            part.recomputed[current][handle] = tensor.detach()

    @property
    def parts(self) -> dict[Any, None]:
        """The parts of checkpoints that have saved some tensor."""
        return {part: None for part, _, _ in self._entries}


class Recomputing:
    """Lets parts of checkpoints run again once, for all calls until it is released.

    Args:
        parts: All parts that may run.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = parts
        self._passes: set[int] = set()  # their numbers identify passes if there is no group
        self.group = _Group()
        """A context to enter when saved tensors are read."""

    def call(self, current: Pass, function: Callable[[], T]) -> T:
        """Calls a function that reads nodes' saved tensors, in a pass that reaches no node.

        The pass asks for no inputs: PyTorch would let nodes compute only what leads to them.
        """
        results: list[T] = []

        def call(*_: object) -> None:
            self.note_pass()
            with self.group:
                results.append(function())

        leaf = torch.zeros((), device="cpu", requires_grad=True)
        with torch.enable_grad():
            root = leaf.view_as(leaf)
        assert root.grad_fn is not None
        root.grad_fn.register_hook(call)
        current.differentiate(root, [], torch.ones_like(leaf))
        return results[0]

    def note_pass(self) -> None:
        """Notes the running pass."""
        self._passes.add(torch._C._current_graph_task_id())

    def release(self) -> None:
        """Frees the tensors that the parts have computed."""
        for part in self._parts:
            for key in (self.group, *self._passes):
                part.recomputed.pop(key, None)
