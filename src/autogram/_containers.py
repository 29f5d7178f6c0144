"""Finds tensors inside arguments and outputs, and replaces them; a dict of limited size."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

K = TypeVar("K")
T = TypeVar("T")

_OPAQUE = (str, bytes, int, float, bool, complex, type(None), nn.Module, type, types.FunctionType)
_SEQUENCES = (list, tuple, set, frozenset)


class Latest(dict[K, T]):
    """A dict of limited size: the oldest entry is dropped where there would be too many.

    Each length of batches has a graph of its own. A graph that is forgotten costs a pass.
    """

    def __init__(self, most: int = 512) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: T) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers and objects: dicts, tuples, dataclasses, caches."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            yield item
        elif not isinstance(item, _OPAQUE) and id(item) not in seen:
            seen.add(id(item))
            pending.extend(reversed(_members(item).values()))  # so that the first comes out first


def replaced(value: Any, substitutes: Mapping[int, Tensor]) -> Any:
    """The value with some tensors, given by their ``id``, replaced."""
    return map_tensors(value, lambda tensor: substitutes.get(id(tensor), tensor))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The value with ``function`` of each tensor in it; the same object if nothing changes.

    Containers are copied and not changed, because they belong to the user's code.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _OPAQUE) or next(tensors_in(value), None) is None:
        return value
    members = _members(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        members = getattr(value, "__dict__", {}) | members  # also attributes that are not fields
    changed = {key: map_tensors(item, function) for key, item in members.items()}
    if all(changed[key] is item for key, item in members.items()):
        return value
    return _with_members(value, changed)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of nested lists, tuples, mappings and dataclasses, with ``function`` of each leaf.

    Everything else is a leaf: a tensor, a number, ``None``, another object.
    """
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    is_nested = is_data or isinstance(value, (list, tuple, Mapping))
    if not is_nested or isinstance(value, torch.Size):
        return function(value)
    members = _members(value)
    return _with_members(value, {key: map_leaves(x, function) for key, x in members.items()})


def _members(item: Any) -> dict[Any, Any]:
    """What a container or an object holds: by key, by number, or by name."""
    if isinstance(item, Mapping):
        return dict(item.items())
    if isinstance(item, _SEQUENCES):
        return dict(enumerate(item))
    if dataclasses.is_dataclass(item):
        names = [field.name for field in dataclasses.fields(item)]
        return {name: getattr(item, name) for name in names if hasattr(item, name)}
    return dict(getattr(item, "__dict__", {}))


def _with_members(value: Any, members: Mapping[Any, Any]) -> Any:
    """A shallow copy of a container or an object with other members."""
    if isinstance(value, _SEQUENCES):
        kind: Any = type(value)
        items = list(members.values())
        # A class of named tuples may take other arguments.
        return tuple.__new__(kind, items) if hasattr(value, "_fields") else kind(items)
    copied = copy.copy(value)
    for name, item in members.items():
        if isinstance(value, Mapping):  # which may refuse `update`
            copied[name] = item
        else:
            object.__setattr__(copied, name, item)  # also where the class is frozen, or has slots
    return copied
