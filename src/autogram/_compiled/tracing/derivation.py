"""Derived tensors inside a compiled region: the part of its graph that computes them.

To autograd, a compiled region is one node. The rows of a derived tensor are pulled back through a
separate graph, which comes from running that part again, outside of the region.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# Active autocast states: device and dtype.
_Autocast = tuple[tuple[str, torch.dtype], ...]


class Derivation(NamedTuple):
    """A part of a region's graph, which computes derived tensors from inputs of the region."""

    graph: fx.GraphModule
    inputs: tuple[int, ...]  # positions of the inputs that it takes
    autocast: _Autocast  # states under which it ran

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
    """Remembers, while a region's graph runs, which node has computed which tensor.

    ``batched`` holds the positions of the inputs that depend on the samples.
    """

    def __init__(self, module: fx.GraphModule, batched: Collection[int]) -> None:
        self._module = module
        inputs = enumerate(module.graph.find_nodes(op="placeholder"))
        self._positions = {node: position for position, node in inputs}
        self._batched = batched
        self._nodes: dict[int, tuple[fx.Node, weakref.ref[Tensor]]] = {}
        self._autocast: dict[fx.Node, _Autocast] = {}
        self._constant: set[fx.Node] = set()
        self._changed: set[fx.Node] = set()
        self._unrepeatable: set[fx.Node] = set()
        self._last: fx.Node | None = None

    def note(self, node: fx.Node, result: Any) -> None:
        """Notes the result of a node, and how it was computed."""
        if isinstance(result, Tensor):
            self._nodes[id(result)] = node, weakref.ref(result)
        if node.op in ("call_function", "call_method"):
            self._autocast[node] = _autocast_now()
            if isinstance(result, Tensor) and not result.requires_grad:
                self._constant.add(node)
        is_transformed = torch._C._are_functorch_transforms_active()
        if is_transformed or not all(map(_gives_the_same, self._traced())):
            self._unrepeatable.add(node)

    def _traced(self) -> Iterator[fx.Node]:
        """The operators that AOTAutograd has traced since the last call, latest first."""
        mode = get_proxy_mode()
        if mode is None:  # only shapes are computed
            return
        nodes = mode.tracer.graph.nodes
        known, self._last = self._last, next(iter(reversed(nodes)), None)
        for node in reversed(nodes):
            if node is known:
                return
            yield node

    def note_change(self, tensor: Tensor) -> None:
        """Notes a tensor without samples that is changed in place, which no edge shows.

        The tensors that it was computed from may share its memory.
        """
        node, _ = self._nodes.get(id(tensor), (None, None))
        if node is None:
            self._changed.update(self._module.graph.nodes)
        else:
            self._changed |= _behind(node)

    def of(self, *tensors: Tensor) -> Derivation | None:
        """The part that computes tensors without samples, or ``None`` if it cannot run again.

        Steps that ran without gradients, such as within `torch.no_grad`, have none in the part.
        """
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
        for step in [x for x in self._module.graph.nodes if x in needed]:
            if step in self._positions:
                inputs.append(self._positions[step])
            values[step] = graph.node_copy(step, lambda x: values[x])
            if step in self._constant:
                values[step] = graph.call_method("detach", (values[step],))
        graph.output(tuple(values[node] for node in nodes))
        module = fx.GraphModule(self._module, graph)
        return Derivation(module, tuple(inputs), states.pop() if states else ())

    def _is_repeatable(self, node: fx.Node) -> bool:
        """Whether a node returns the same again, whatever the samples are."""
        if node in self._positions:
            return self._positions[node] not in self._batched
        return node not in self._unrepeatable


def _gives_the_same(node: fx.Node) -> bool:
    """Whether a traced operator is known to return the same for the same arguments."""
    target: Any = node.target
    namespace = getattr(target, "namespace", None)
    if namespace not in ("aten", "prims"):
        return namespace is None  # Python's own; others are the user's, or run their own graphs
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return True
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":  # attention
            given = node.args[place] if place < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) == 0)
    return False


def _behind(node: fx.Node) -> set[fx.Node]:
    """A node, and all nodes that it is computed from."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        step = pending.pop()
        if step not in found:
            found.add(step)
            pending += step.all_input_nodes
    return found


def _autocast_now() -> _Autocast:
    """The current state of autocast."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu", *([accelerator.type] if accelerator else [])]
    return tuple((x, torch.get_autocast_dtype(x)) for x in devices if torch.is_autocast_enabled(x))
