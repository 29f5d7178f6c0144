"""Views of a parameter: which of its elements a node's result has, told by what the node saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autogram._capture.autograd.graph import kind_of_node
from autogram._capture.places.transfers.step import signed

# Gives the view of a tensor that a node made, from the tensor, the node and the number of a result.
_View = Callable[[Tensor, Any, int], Tensor]


def is_of_view(node: Any) -> bool:
    """Whether a node is that of a call which returns views, or copies, of its only input."""
    return kind_of_node(node.__class__).operation in _VIEWS and len(node.next_functions) == 1


def viewed(leaf: Tensor, chain: Sequence[tuple[Any, int]]) -> Tensor | None:
    """A leaf as nodes of views see it, with the numbers of their results; ``None`` if none can.

    Args:
        leaf: The parameter.
        chain: The nodes, from the leaf on.
    """
    tensor = leaf.detach()
    for node, result in chain:
        view = _VIEWS[kind_of_node(node.__class__).operation]
        try:
            tensor = view(tensor, node, result)
        except (RuntimeError, IndexError, AttributeError):
            return None  # of a copy in another shape, or a field that this version lacks
        if tuple(tensor.shape) != tuple(node._input_metadata[result].shape):
            return None
    return tensor


def _transposed(tensor: Tensor, node: Any, _: int) -> Tensor:
    if not hasattr(node, "_saved_dim0"):
        return tensor.t()
    return tensor.transpose(signed(node._saved_dim0), signed(node._saved_dim1))


def _permuted(tensor: Tensor, node: Any, _: int) -> Tensor:
    return tensor.permute([signed(dim) for dim in node._saved_dims])


def _reshaped(tensor: Tensor, node: Any, result: int) -> Tensor:
    return tensor.view(tuple(node._input_metadata[result].shape))


def _unsqueezed(tensor: Tensor, node: Any, _: int) -> Tensor:
    return tensor.unsqueeze(signed(node._saved_dim))


def _sliced(tensor: Tensor, node: Any, _: int) -> Tensor:
    start, end = signed(node._saved_start), signed(node._saved_end)
    return torch.ops.aten.slice(tensor, signed(node._saved_dim), start, end, node._saved_step)  # type: ignore[no-any-return]  # as typed in torch


def _selected(tensor: Tensor, node: Any, _: int) -> Tensor:
    return tensor.select(signed(node._saved_dim), signed(node._saved_index))


def _split(tensor: Tensor, node: Any, result: int) -> Tensor:
    sizes = getattr(node, "_saved_split_sizes", None)
    size = node._saved_split_size if sizes is None else list(sizes)
    return tensor.split(size, signed(node._saved_dim))[result]  # type: ignore[no-any-return]  # as typed in torch


def _unbound(tensor: Tensor, node: Any, result: int) -> Tensor:
    return tensor.unbind(signed(node._saved_dim))[result]


def _same(tensor: Tensor, _: Any, __: int) -> Tensor:
    return tensor


_VIEWS: Mapping[str, _View] = {
    **dict.fromkeys(("T", "Transpose"), _transposed),
    **dict.fromkeys(("View", "UnsafeView", "ReshapeAlias", "Squeeze"), _reshaped),
    **dict.fromkeys(("Split", "UnsafeSplit", "SplitWithSizes"), _split),
    **dict.fromkeys(("Alias", "ViewAs", "Clone", "ToCopy"), _same),
    "Permute": _permuted,
    "Unsqueeze": _unsqueezed,
    "Slice": _sliced,
    "Select": _selected,
    "Unbind": _unbound,
}
