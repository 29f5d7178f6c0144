"""Ways: how a node of a tail reads parameters, or tensors that are computed from these alone.

A matrix product has the factors of its rows, and what is broadcast to an element-wise node has the
cotangents of single elements, before they are added up. In both cases, more element-wise nodes may
come before, and behind these a view that puts tokens one behind the other for the product.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._capture.autograd.graph import VIEWS, kind_of_node
from autogram._capture.places.transfers.table import is_elementwise

_PRODUCT = "MmBackward0"  # C = A B, with dB = A^T dC
_LAYER_NORM, _WEIGHT = "NativeLayerNormBackward", 4  # which input is its weight
# Element-wise nodes that return the gradient of an input before it is summed along dimensions in
# which the input was broadcast, as autograd does behind them.
BROADCASTING = {
    *("Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Where", "Maximum", "Minimum", "Lerp", "Addcmul"),
    *("Addcdiv", "Expand"),
}
_MOST = 64  # ways from one input of a node

NodeResult = tuple[Any, int]
"""A node and one of its results."""


class WayStep(NamedTuple):
    """The way to an input of a node that multiplies its cotangent element by element."""

    node: Any
    position: int

    @property
    def edge(self) -> NodeResult:
        """What the input is."""
        edge: NodeResult = self.node.next_functions[self.position]
        return edge

    def carry(self, cotangent: Tensor) -> Tensor | None:
        """What the input gets, of the shape of the result: no dimension is summed."""
        node, operation = self.node, kind_of_node(self.node.__class__).operation
        if operation == "Expand":
            return cotangent
        if operation == _LAYER_NORM:
            if self.position > _WEIGHT:
                return None  # no gradient depends on the bias
            # dx = P(w dy), with a symmetric P for each sample; so dw is dy P(c), summed.
            saved = node._saved_input, node._saved_normalized_shape, node._saved_mean
            arguments = cotangent, *saved, node._saved_rstd, None, None, [True, False, False]
            found: Any = torch.ops.aten.native_layer_norm_backward(*arguments)
            given: Tensor | None = found[0] * node._saved_grad_out
        else:
            found = node(cotangent)
            given = found[self.position] if isinstance(found, tuple) else found
        return given


class TailWay(NamedTuple):
    """How a node reads parameters, or a tensor that is computed from parameters alone."""

    steps: tuple[WayStep, ...]
    edge: NodeResult
    """What is read: the second factor of a product, or what is broadcast."""
    product: Any = None
    """The node of a matrix product behind the steps, if there is one."""


def ways_of(node: Any, reading: Collection[Any]) -> dict[NodeResult, list[TailWay] | None]:
    """The ways by which a node reads each of its inputs that are computed from parameters alone."""
    found: dict[NodeResult, list[TailWay] | None] = {}
    for position, edge in enumerate(node.next_functions):
        if edge[0] in reading:
            ways = _ways(node, position, reading)
            before = found.get(edge, [])
            found[edge] = None if ways is None or before is None else [*before, *ways]
    return found


def _ways(node: Any, position: int, reading: Collection[Any]) -> list[TailWay] | None:
    """The ways through one input of a node, or ``None`` if other nodes are between.

    Of complex numbers, a factor would have to be conjugated.
    """
    step = WayStep(node, position)
    child, result = step.edge
    of, *others = node._input_metadata
    if of.dtype.is_complex:
        return None
    if node.name() == _PRODUCT:
        is_second = position == 1 and node.next_functions[0][0] not in reading
        return [TailWay((), step.edge, node)] if is_second else None
    operation = kind_of_node(node.__class__).operation
    if operation == _LAYER_NORM and position >= _WEIGHT:
        return [TailWay((step,), step.edge)]
    shape, given = tuple(of.shape), tuple(child._input_metadata[result].shape)
    if operation in VIEWS and child.name() == _PRODUCT and shape[-1:] == given[-1:]:
        return _ways(child, 1, reading)
    if others or not is_elementwise(node):
        return None
    if shape != given or hasattr(child, "variable"):
        is_whole = shape == given or operation in BROADCASTING
        return [TailWay((step,), step.edge)] if is_whole else None
    found: list[TailWay] = []
    for onward, (behind, _) in enumerate(child.next_functions):
        ways = _ways(child, onward, reading) if behind in reading else []
        if ways is None or len(found) + len(ways) > _MOST:
            return None
        found += [way._replace(steps=(step, *way.steps)) for way in ways]
    return found
