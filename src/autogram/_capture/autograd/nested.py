"""Nested passes: those that a hook or a custom autograd Function starts inside of one of ours."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.variable import Variable

from autogram._capture.autograd.graph import leaves_behind


class Outer(Protocol):
    """A pass of ours."""

    def note_nested(self, changing: Sequence[Tensor]) -> None:
        """Learns that a pass begins inside of this one, which may add to some tensors' `.grad`."""
        ...


class Aside:
    """Gradients that are put aside, so that what others add to `.grad` meanwhile can be dropped."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}  # by the `id`

    def take(self, tensor: Tensor) -> None:
        """Puts the gradient of a tensor aside, unless it was before."""
        known = self._kept.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._kept[id(tensor)] = weakref.ref(tensor), tensor.grad
            if tensor.grad is not None:
                tensor.grad = None

    def put_back(self) -> list[Tensor]:
        """Puts all gradients back.

        Returns:
            The tensors that had got another one. Those that nobody holds any more, as the leaves
            that a Function makes for itself, are left out.
        """
        changed = []
        while self._kept:
            reference, gradient = self._kept.popitem()[1]
            tensor = reference()
            if tensor is not None and tensor.grad is not gradient:
                changed += [tensor] if tensor.grad is not None else []
                tensor.grad = gradient
        return changed[::-1]


@contextmanager
def watching(find_outer: Callable[[], Outer | None]) -> Iterator[None]:
    """Lets passes of ours know of those that begin inside of them.

    PyTorch tells nobody, so its engine is wrapped for as long as a pass of ours runs. The next pass
    that this thread starts is taken for ours.

    Args:
        find_outer: Gives the pass of ours that the autograd node which runs now belongs to.
    """
    pytorch: Any = Variable
    with _LOCK:
        if not _WATCHERS:
            pytorch._execution_engine = _Watcher(pytorch._execution_engine, find_outer)
        _WATCHERS.append(pytorch._execution_engine)
    before, _HERE.is_ours = _HERE.is_ours, True
    try:
        yield
    finally:
        _HERE.is_ours = before
        with _LOCK:
            watcher = _WATCHERS.pop()
            if not _WATCHERS and pytorch._execution_engine is watcher:
                pytorch._execution_engine = watcher.engine


class _Here(threading.local):
    """What is known of this thread."""

    is_ours = False
    """Whether the next pass that begins is ours."""
    outer: Outer | None = None
    """The pass of ours that a nested one, which runs now, is inside of."""


_HERE = _Here()
_LOCK = threading.Lock()
_WATCHERS: list[Any] = []  # the same one, for each pass of ours that runs

# Those of `run_backward` of PyTorch's engine, in their order.
_ARGUMENTS = (
    "tensors",
    "grad_tensors",
    "keep_graph",
    "create_graph",
    "inputs",
    "allow_unreachable",
    "accumulate_grad",
)


class _Watcher:
    """PyTorch's engine, with an eye on passes inside of ours."""

    def __init__(self, engine: Any, find_outer: Callable[[], Outer | None]) -> None:
        self.engine = engine
        self._find_outer = find_outer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a backward pass."""
        is_ours, _HERE.is_ours = _HERE.is_ours, False
        outer = None if is_ours else self._find_outer() or _HERE.outer
        if outer is None:
            return self.engine.run_backward(*args, **kwargs)
        before, _HERE.outer = _HERE.outer, outer
        try:
            outer.note_nested(_changing({**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}))
            return self.engine.run_backward(*args, **kwargs)
        finally:
            _HERE.outer = before


def _changing(arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors whose `.grad` a pass with these arguments may add to."""
    if not arguments.get("accumulate_grad"):
        return []
    if inputs := arguments.get("inputs"):
        return [x for x in inputs if isinstance(x, Tensor)]
    return [leaf for output in arguments["tensors"] for leaf in leaves_behind(output)]
