"""What one node computes or has saved, where a checkpoint may run a part of the model again for it.

A checkpoint computes what a part has saved once for each backward pass, or for each group of
passes, and keeps what nobody asks for as long as the graph is alive.
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

# Passes of one group run a part once. Without groups, in old versions, each read runs it.
_Group: Any = getattr(checkpoint, "GraphExecGroup", nullcontext)


def checkpointed_parts(nodes: Iterable[Any]) -> dict[Any, None]:
    """The parts of checkpoints, each once, that run again where some nodes' saved tensors are read.

    Not those of a call whose result was a slice that was changed in place: its node hides them.
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
    """The names of a node's fields that have what it saved, as it is packed."""
    return [f"_raw{field}" for field in kind_of_node(type(node)).tensors]


def _part(unpack: Any) -> Any:
    """What PyTorch keeps of the part that runs again where a tensor is unpacked, or ``None``."""
    if "checkpoint" not in getattr(unpack, "__module__", ""):
        return None
    names, cells = unpack.__code__.co_freevars, unpack.__closure__ or ()
    return dict(zip(names, [cell.cell_contents for cell in cells], strict=True)).get("frame")


@dataclass
class Lent:
    """The tensors that one node saved, read once, for any number of uses of the node.

    A checkpoint lets each tensor be read once in a pass: after that, it must be given back.
    """

    node: Any
    values: dict[str, Any]
    """By field: a tensor, or several."""
    _entries: list[tuple[Any, Any, Tensor]]
    """For each tensor of a checkpoint: the part, what stands for the tensor, and the tensor."""

    @classmethod
    def of(cls, node: Any) -> Lent:
        """What a node saved, which is read now."""
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
        """Lets the node read its tensors once more, in the pass that runs."""
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
        self._passes: set[int] = set()  # their numbers, by which parts run where no group is
        self.group = _Group()
        """To be entered where saved tensors are read."""

    def call(self, current: Pass, function: Callable[[], T]) -> T:
        """Calls a function that reads what nodes have saved, in a pass that reaches no node.

        The pass asks for no inputs: PyTorch would let nodes compute only what leads to these.
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
        """Notes the pass that runs."""
        self._passes.add(torch._C._current_graph_task_id())

    def release(self) -> None:
        """Frees what the parts have computed."""
        for part in self._parts:
            for key in (self.group, *self._passes):
                part.recomputed.pop(key, None)
