"""Passes that show the cotangents of uses: by hooks on nodes, and at the last nodes by inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from autogram._capture.autograd.graph import in_dense, nodes_leading_to
from autogram._capture.autograd.nested import running_pass
from autogram._capture.autograd.passes import Pass
from autogram._capture.autograd.recomputing import Lent, Recomputing, checkpointed_parts
from autogram._capture.from_graph.node_uses import NodeUse
from autogram._undo import undone


class Surveyed(Protocol):
    """The graph behind some losses."""

    nodes: list[Any]
    """All nodes."""
    node_uses: list[NodeUse]
    """The uses of some nodes."""
    last_nodes: frozenset[int]
    """The numbers of those behind which there is no other use."""


class Showing:
    """Shows the uses of a graph to passes from its losses.

    The pass asks PyTorch for the cotangents of the last uses on each path alone, so that it
    computes no gradient of a parameter. What it gives for a node that it carries out does not count
    hooks on tensors. Therefore all other cotangents are taken by hooks on nodes.

    Args:
        survey: The graph, whose uses are known.
    """

    def __init__(self, survey: Surveyed) -> None:
        self._by_node: dict[Any, list[NodeUse]] = {}
        for use in survey.node_uses:
            self._by_node.setdefault(use.edge.node, []).append(use)
        self._last = [survey.nodes[number] for number in survey.last_nodes]
        self._parts: dict[
            Any, dict[Any, None]
        ] = {}  # of checkpoints, by the nodes that are in some
        if checkpointed_parts(self._by_node):
            parts = {node: checkpointed_parts([node]) for node in self._by_node}
            self._parts = {node: of for node, of in parts.items() if of}
        self._early = self._find_early(survey.nodes) if self._parts else {}

    def _find_early(self, nodes: Sequence[Any]) -> dict[Any, list[Any]]:
        """By node that is carried out: the last nodes that are read just before.

        A part of a checkpoint runs again for nodes that are carried out. What nodes saved that are
        not is read then, so that it need not run once more.
        """
        early: dict[Any, list[Any]] = {}
        carried_out = nodes_leading_to(self._last, nodes) - {*self._last}
        by_part = {part: node for node in carried_out for part in checkpointed_parts([node])}
        for node in self._last:
            for part in self._parts.get(node, {}).keys() & by_part.keys():
                early.setdefault(by_part[part], []).append(node)
        return early

    def differentiate(
        self, current: Pass, losses: Tensor, cotangent: Tensor, *, retain_graph: bool
    ) -> None:
        """Runs a pass, which shows its receiver the uses."""
        inputs = [
            GradientEdge(node, i)
            for node in self._last
            for i in sorted({use.edge.output_nr for use in self._by_node[node]})
        ]
        if not inputs:
            return
        lent: dict[Any, Lent] = {}
        handles: list[Any] = []

        def remove() -> None:
            for handle in handles:
                handle.remove()

        def visit(node: Any, cotangents: Sequence[Tensor | None]) -> None:
            if running_pass() is current:
                lent.update({last: Lent.of(last) for last in self._early.get(node, ())})
                if node in self._by_node:
                    if node in self._parts:
                        lent[node] = Lent.of(node)
                        lent[node].give_back()
                    self._show(current, node, dict(enumerate(cotangents)), lent.pop(node, None))

        with undone(remove):
            hooked = {**self._by_node, **self._early}.keys() - {*self._last}
            handles.extend(node.register_prehook(partial(visit, node)) for node in hooked)
            gradients = current.differentiate(losses, inputs, cotangent, retain_graph=retain_graph)
        by_node: dict[Any, dict[int, Tensor | None]] = {}
        for edge, gradient in zip(inputs, gradients, strict=True):
            by_node.setdefault(edge.node, {})[edge.output_nr] = gradient
        late = [node for node in self._last if node in self._parts and node not in lent]
        if late:
            again = Recomputing({part: None for node in late for part in self._parts[node]})
            alone = Pass(current.channel, is_alone=True)
            lent.update(again.call(alone, lambda: {node: Lent.of(node) for node in late}))
            again.release()
        for node in self._last:
            self._show(current, node, by_node[node], lent.pop(node, None))
        current.raise_error()

    def _show(
        self, current: Pass, node: Any, cotangents: Mapping[int, Tensor | None], lent: Lent | None
    ) -> None:
        """Shows the uses of a node."""
        for use in self._by_node[node]:
            cotangent = cotangents[use.edge.output_nr]
            if cotangent is not None:
                use.lent = lent
                current.show(partial(_read, current, use), in_dense(cotangent))


def _read(current: Pass, use: NodeUse, shown: Tensor) -> None:
    current.receiver(use, use.tensors(), shown)
