"""Finds tensors inside of arguments and outputs, and replaces them; a dict of limited size."""

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
            pending.extend(reversed(list(_members(item))))  # so that the first comes out first


def replaced(value: Any, substitutes: Mapping[int, Tensor]) -> Any:
    """The value with some tensors, given by their ``id``, replaced."""
    if isinstance(value, Tensor):
        return substitutes.get(id(value), value)
    return map_tensors(value, lambda tensor: substitutes.get(id(tensor), tensor))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The value with ``function`` of each tensor in it; the same object if nothing changes.

    Containers are copied and not changed, because they belong to the user's code.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _OPAQUE) or next(tensors_in(value), None) is None:
        return value
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _sequence(value, items)
    members = value if isinstance(value, Mapping) else vars(value)
    changed = {name: map_tensors(item, function) for name, item in members.items()}
    if all(changed[name] is members[name] for name in members):
        return value
    return _with_members(value, changed)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of nested lists, tuples, mappings and dataclasses, with ``function`` of each leaf.

    Everything else is a leaf: a tensor, a number, ``None``, another object.
    """
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return _sequence(value, [map_leaves(item, function) for item in value])
    if isinstance(value, Mapping):
        return _with_members(value, {key: map_leaves(x, function) for key, x in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _with_members(value, {key: map_leaves(x, function) for key, x in members.items()})
    return function(value)


def _sequence(like: Any, items: list[Any]) -> Any:
    """A list or a tuple of the same type with other items."""
    if hasattr(like, "_fields"):  # a class of its own may take other arguments
        return tuple.__new__(type(like), items)
    return type(like)(items)


def _with_members(value: Any, members: Mapping[Any, Any]) -> Any:
    """A shallow copy of a mapping or an object with other members."""
    copied = copy.copy(value)
    for name, item in members.items():
        if isinstance(value, Mapping):  # which may refuse `update`
            copied[name] = item
        else:
            object.__setattr__(copied, name, item)  # also where the class is frozen, or has slots
    return copied


def _members(item: Any) -> Iterator[Any]:
    """What a container or an object holds."""
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from item
    elif dataclasses.is_dataclass(item):
        yield from (getattr(item, field.name, None) for field in dataclasses.fields(item))
    else:
        yield from getattr(item, "__dict__", {}).values()
