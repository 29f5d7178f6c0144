"""Derived tensors inside of a compiled region: the part of its graph that computes them.

A compiled region is one node for autograd. The rows of a derived tensor are pulled back through a
graph of its own, which comes from running that part again, outside of the region.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autogram._capture.forward.calls import kind_of

# Autocast as it is on the devices where it is on: device and dtype.
_Autocast = tuple[tuple[str, torch.dtype], ...]
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "exponential")


class Derivation(NamedTuple):
    """How derived tensors are computed from inputs of the region.

    Attributes:
        graph: The part of the region's graph.
        inputs: The positions of the inputs that it takes.
        autocast: Under which it ran.
    """

    graph: fx.GraphModule
    inputs: tuple[int, ...]
    autocast: _Autocast

    def run(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Computes the tensors again, with a graph of autograd."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch._C.DisableTorchFunction())
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            derived: tuple[Tensor, ...] = self.graph(*inputs)
        return derived


class History:
    """Which node of a region's graph has computed which tensor, while the graph runs.

    Args:
        module: The graph.
        is_batched: Whether an input, by its position, depends on the samples.
    """

    def __init__(self, module: fx.GraphModule, is_batched: Callable[[int], bool]) -> None:
        self._module = module
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._positions = {node: position for position, node in enumerate(inputs)}
        self._is_batched = is_batched
        self._nodes: dict[int, tuple[fx.Node, weakref.ref[Tensor]]] = {}
        self._autocast: dict[fx.Node, _Autocast] = {}
        self._changed: set[fx.Node] = set()

    def note(self, node: fx.Node, result: Any) -> None:
        """Notes what a node has computed."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor is result:
                self._nodes[id(tensor)] = node, weakref.ref(tensor)
        if node.op in ("call_function", "call_method"):
            self._autocast[node] = _autocast_now()

    def note_change(self, tensor: Tensor) -> None:
        """Notes a tensor without samples that is changed in place, which no edge shows.

        What it was computed from may share its memory.
        """
        node, _ = self._nodes.get(id(tensor), (None, None))
        if node is None:
            self._changed.update(self._module.graph.nodes)
        else:
            self._changed |= _behind(node)

    def of(self, *tensors: Tensor) -> Derivation | None:
        """The part that computes tensors without samples, or ``None`` if it cannot run again."""
        known = [self._nodes.get(id(tensor), (None, lambda: None)) for tensor in tensors]
        if any(reference() is not x for x, (_, reference) in zip(tensors, known, strict=True)):
            return None
        nodes = [node for node, _ in known if node is not None]
        needed = set[fx.Node]().union(*map(_behind, nodes))
        if not self._changed.isdisjoint(needed) or not all(map(self._is_repeatable, needed)):
            return None
        states = {self._autocast[step] for step in needed if step in self._autocast}
        if len(states) > 1:
            return None
        graph, values, inputs = fx.Graph(), dict[fx.Node, fx.Node](), []
        for step in self._module.graph.nodes:
            if step in needed and step in self._positions:
                inputs.append(self._positions[step])
            if step in needed:
                values[step] = graph.node_copy(step, lambda x: values[x])
        graph.output(tuple(values[node] for node in nodes))
        module = fx.GraphModule(self._module, graph)
        return Derivation(module, tuple(inputs), states.pop() if states else ())

    def _is_repeatable(self, node: fx.Node) -> bool:
        """Whether a node gives the same again, whatever the samples are."""
        if node in self._positions:
            return not self._is_batched(self._positions[node])
        if node.op not in ("call_function", "call_method"):
            return node.op == "get_attr"
        name = node.target if isinstance(node.target, str) else kind_of(node.target).name
        return not any(word in name for word in _RANDOM)


def _behind(node: fx.Node) -> set[fx.Node]:
    """A node, and all that it is computed from."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        step = pending.pop()
        if step not in found:
            found.add(step)
            pending += step.all_input_nodes
    return found


def _autocast_now() -> _Autocast:
    """Autocast as it is now."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu", *([accelerator.type] if accelerator else [])]
    return tuple((x, torch.get_autocast_dtype(x)) for x in devices if torch.is_autocast_enabled(x))
