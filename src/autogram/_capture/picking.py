"""Picking: index tensors along the first dimension, which can move samples to other places.

No shape shows which samples a mask or a permutation picks, so the values of such an index are a
part of what layouts are remembered by. Along other dimensions, samples stay where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Values = tuple[Any, ...]

_BY_INDEX = {"__getitem__", "__setitem__", "index_put", "index_put_"}
_BY_PLACE = {"masked_select", "take"}
_ALONG_DIM = {
    "index_select",
    "gather",
    "take_along_dim",
    *(name + suffix for name in ("scatter", "scatter_add", "index_add") for suffix in ("", "_")),
}
PICKING = _BY_INDEX | _BY_PLACE | _ALONG_DIM
_NODES_ALONG_DIM = {
    "IndexSelectBackward0",
    "GatherBackward0",
    "ScatterBackward0",
    "ScatterAddBackward0",
    "IndexAddBackward0",
    "SortBackward0",
    "TopkBackward0",
}


def picked_by_call(name: str, args: tuple[Any, ...]) -> Values:
    """The values by which a torch call picks along the first dimension of its first argument."""
    if name in _BY_INDEX:
        index = args[1][0] if isinstance(args[1], (tuple, list)) and args[1] else args[1]
        return _values(index)
    if name in _BY_PLACE:
        return _values(args[1])
    if name in _ALONG_DIM:
        dims = [x for x in args[1:3] if isinstance(x, int)]
        index = next((x for x in args[1:3] if isinstance(x, Tensor)), None)
        return _values(index) if dims in ([], [0]) else ()
    return ()


def picked_by_node(node: Any) -> Values:
    """The values by which a node of the graph picks along the first dimension."""
    name = node.name()
    if name in ("IndexBackward0", "IndexPutBackward0"):
        return _values(node._saved_indices[0])
    if name == "MaskedSelectBackward0":
        return _values(node._saved_mask)
    if name == "TakeBackward0" or (name in _NODES_ALONG_DIM and node._saved_dim == 0):
        return _values(getattr(node, "_saved_index", getattr(node, "_saved_indices", None)))
    return ()


def _values(index: Any) -> Values:
    """The values of an index tensor; nothing of a slice or a number."""
    if not isinstance(index, Tensor) or index.dtype.is_floating_point:
        return ()
    with torch.no_grad():
        return tuple(index.flatten().tolist())
