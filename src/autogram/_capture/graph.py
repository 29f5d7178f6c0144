"""Walks through the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def nodes_behind(tensor: Tensor, is_end: Callable[[Any], bool]) -> Iterator[Any]:
    """Each node that a tensor depends on, once, up to those that are an end."""
    seen: set[Any] = set()
    pending: list[Any] = [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not is_end(node):
            pending.extend(following for following, _ in node.next_functions)
