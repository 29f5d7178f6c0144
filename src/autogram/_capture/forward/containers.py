"""Tensors inside arguments and outputs: found, and exchanged for others."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_OPAQUE = (str, bytes, int, float, bool, complex, type(None), nn.Module, type, types.FunctionType)


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


def exchange(value: Any, substitutes: Mapping[int, Tensor]) -> Any:
    """The value with some tensors, given by their ``id``, exchanged."""
    return map_tensors(value, lambda tensor: substitutes.get(id(tensor), tensor))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The value with ``function`` of each tensor in it; itself if that changes nothing.

    Containers are copied and not changed: they belong to the user's code, which may keep them.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _OPAQUE) or next(tensors_in(value), None) is None:
        return value
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    is_mapping = isinstance(value, Mapping)
    members = value if is_mapping else vars(value)
    changed = {name: map_tensors(item, function) for name, item in members.items()}
    if all(changed[name] is members[name] for name in members):
        return value
    copied = copy.copy(value)
    target = copied if is_mapping else vars(copied)
    for name, item in changed.items():  # a mapping may refuse `update`
        target[name] = item
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
