"""Sizes that a compiled part leaves open: each symbol's value in a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from autogram._capture.forward.decision import Batch

OpenSizes = tuple[int, ...]


class Sizes:
    """Finds the values of symbolic sizes from the arguments of a call.

    Among the sizes of the traced arguments, each symbol occurs alone somewhere.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        found: dict[Any, tuple[int, int | None]] = {}
        for position, x in enumerate(args):
            sizes = list(enumerate(x.shape)) if isinstance(x, Tensor) else [(None, x)]
            for dim, size in sizes:
                if isinstance(size, torch.SymInt):
                    symbol = _expression(size)
                    if symbol.is_symbol:
                        found.setdefault(symbol, (position, dim))
        self._symbols = tuple(found)
        self._places = tuple(found.values())

    @property
    def are_open(self) -> bool:
        """Whether sizes differ from call to call."""
        return bool(self._symbols)

    def of(self, args: Sequence[Any]) -> OpenSizes:
        """The values of the symbols in a call."""
        return tuple(
            int(args[position] if dim is None else args[position].shape[dim])
            for position, dim in self._places
        )

    def know(self, item: Any) -> bool:
        """Whether the symbols determine every size in an item."""
        seen: list[Any] = []
        try:
            map_sizes(item, lambda size: seen.append(_expression(size)))
        except TypeError:
            return False
        return all(x.free_symbols <= set(self._symbols) for x in seen)

    def resolve(self, item: Any, numbers: OpenSizes) -> Any:
        """An item with numbers instead of symbolic sizes."""
        if not numbers:
            return item
        values: Mapping[Any, int] = dict(zip(self._symbols, numbers, strict=True))
        return map_sizes(item, lambda size: int(_expression(size).subs(values)))


def map_sizes(item: Any, number_of: Callable[[torch.SymInt], Any]) -> Any:
    """A copy of an item with other values for symbolic sizes; the same item if it has none.

    Raises:
        TypeError: It holds sizes that cannot be replaced.
    """
    if isinstance(item, torch.SymInt):
        return number_of(item)
    if isinstance(item, partial):
        arguments = map_sizes((item.args, item.keywords), number_of)
        function = map_sizes(item.func, number_of)
        if function is item.func and arguments[0] is item.args and arguments[1] is item.keywords:
            return item
        return partial(function, *arguments[0], **arguments[1])
    if isinstance(item, dict):
        values = {key: map_sizes(value, number_of) for key, value in item.items()}
        return item if all(values[key] is item[key] for key in item) else values
    if isinstance(item, (tuple, list)):
        parts = [map_sizes(part, number_of) for part in item]
        if all(new is old for new, old in zip(parts, item, strict=True)):
            return item
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if isinstance(item, MethodType):
        owner = map_sizes(item.__self__, number_of)
        return item if owner is item.__self__ else getattr(owner, item.__name__)
    if is_dataclass(item) and not isinstance(item, type):
        kept = {x.name: getattr(item, x.name) for x in fields(item)}
        changed = map_sizes(kept, number_of)
        return item if changed is kept else replace(item, **changed)
    cells = [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
    if any(isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) for x in cells):
        raise TypeError
    if isinstance(item, (torch.SymFloat, torch.SymBool)):
        raise TypeError
    return item


class OpenBatch(Batch):
    """Facts about samples whose number may be open: an expression of symbols."""

    @classmethod
    def of(cls, args: Sequence[Any], batched: Sequence[int], samples: int) -> OpenBatch:
        """The samples among the arguments of a tracing, with their number."""
        if samples == 1:
            return cls()
        inputs = [args[i] for i in batched if isinstance(args[i], Tensor)]
        shapes = [x.shape for x in inputs if not x.is_nested]
        sizes = [size for dim in (0, 1) for shape in shapes for size in shape[dim : dim + 1]]
        sizes += [x for x in args if isinstance(x, torch.SymInt)]
        return cls(next((_expression(n) for n in sizes if _hint(n) == samples), samples))

    def is_size(self, size: Any) -> bool:
        """Whether a size is the number of samples in every call. This sets no guard."""
        return bool(_expression(size) == self.samples)


def _hint(size: Any) -> Any:
    """The value of a size during tracing, if it has one."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _expression(size: Any) -> Any:
    """A size as an expression of symbols, simplified by the known facts about them."""
    if not isinstance(size, torch.SymInt):
        return size
    node: Any = size.node
    return node.shape_env.simplify(node.expr)
