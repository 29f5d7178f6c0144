"""Picking: index tensors, which can move samples to other places.

No shape shows which samples a mask or a permutation picks, so the values of indices are a part of
what layouts are remembered by. Two uses that are in every training loop are left out, because they
pick for each sample on its own: ``x[arange, y]`` and ``x.gather(-1, y)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Values = tuple[Any, ...]

_BY_INDEX = {"__getitem__", "__setitem__"}
_ALONG_LAST = {"gather", "take_along_dim"}
_ALONG_ANY = (
    *("scatter", "scatter_add", "scatter_reduce", "masked_scatter"),
    *("index_add", "index_copy", "index_reduce", "index_put"),
)
_PACKED = {"rnn_tanh", "rnn_relu", "lstm", "gru"}  # by the numbers of sequences at each step
_TABLES = {"embedding", "embedding_bag"}
_BY_ORDER = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
PICKING = (
    {"index_select", "masked_select", "take", "repeat_interleave", "_pack_padded_sequence"}
    | {name + end for name in _ALONG_ANY for end in ("", "_")}
    | _BY_INDEX
    | _PACKED
    | _ALONG_LAST
    | _BY_ORDER
    | _TABLES
)

_NODES_ALONG_LAST = {"GatherBackward0", "SortBackward0", "TopkBackward0"}
_NODES = {
    "IndexSelectBackward0",
    "MaskedSelectBackward0",
    "TakeBackward0",
    "ScatterBackward0",
    "ScatterAddBackward0",
    "IndexAddBackward0",
    "IndexCopyBackward0",
    "MaskedScatterBackward0",
    "ScatterReduceBackward0",
    "EmbeddingBackward0",
    "EmbeddingBagBackward0",
}


def picked_from(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """The tensors that a call reads rows of, or ``None`` if it may do more than that.

    Where none of them holds samples, none is moved: tokens are looked up in a table.
    """
    if name in _TABLES:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        return [x for x in tensors if x.is_floating_point()]
    return [args[0]] if name in ("__getitem__", "index_select") and args else None


def picked_by_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
    """The values by which a torch call picks from its arguments."""
    if name in _BY_ORDER:  # of the outputs of one `unbind`, say
        return tuple(tensor.output_nr for tensor in args[0]) if args else ()
    if name in _BY_INDEX:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return _values_of_all(index)
    others = (*args, *kwargs.values()) if name in _TABLES else (*args[1:], *kwargs.values())
    if name in _ALONG_LAST and args:
        dims = [x for x in others if isinstance(x, int)]
        if dims and dims[0] in (-1, args[0].dim() - 1):
            return ()
    return tuple(_values_of_all(x) if isinstance(x, tuple) else _values(x) for x in others)


def picked_by_node(node: Any) -> Values:
    """The values by which a node of the graph picks."""
    name = node.name()
    if name in ("IndexBackward0", "IndexPutBackward0"):
        return _values_of_all(node._saved_indices)
    if name in _NODES_ALONG_LAST:
        sizes = getattr(node, "_saved_self_sym_sizes", None) or node._saved_self.shape
        if node._saved_dim % (1 << 64) in ((1 << 64) - 1, len(sizes) - 1):
            return ()
    elif name not in _NODES:
        return ()
    fields = ("_saved_index", "_saved_indices", "_saved_mask", "_saved_offsets")
    return tuple(_values(getattr(node, field, None)) for field in fields)


def _values_of_all(index: Iterable[Any]) -> Values:
    """The values of an index with several entries, if it does not run through the samples."""
    entries = tuple(index)
    first = entries[0] if entries else None
    if len(entries) > 1 and isinstance(first, Tensor) and first.dim() == 1:
        with torch.no_grad():
            if torch.equal(first, torch.arange(len(first), device=first.device)):
                return ("in order",)
    return tuple(_values(entry) for entry in entries)


def _values(index: Any) -> Any:
    """The values of an index tensor or a list; nothing of a slice or a number."""
    if type(index).__module__ == "numpy":
        return repr(index.tolist())
    if isinstance(index, list):
        return tuple(_values(entry) if not isinstance(entry, int) else entry for entry in index)
    if not isinstance(index, Tensor) or index.is_floating_point() or index.is_complex():
        return None
    with torch.no_grad():
        return tuple(index.flatten().tolist())
