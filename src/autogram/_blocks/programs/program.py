"""Programs: the torch calls of a function, recorded once and replayed for other tensors."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from autogram._blocks.kernels.workspace import Memory
from autogram._containers import tensors_in
from autogram._undo import undone

T = TypeVar("T")

# Calls that read a property of a tensor, not an element, and compute no tensor.
_PROPERTIES = (
    "shape dtype device ndim layout is_cuda requires_grad is_leaf grad_fn is_nested is_sparse "
    "_version _base nbytes itemsize"
)
_METHODS = "size dim numel stride is_contiguous is_floating_point is_complex element_size __len__"
QUESTIONS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(Tensor, name) for name in _METHODS.split()),
    ]
)

# The exact types of other arguments of calls: numbers of other libraries are written differently.
_PLAIN = (type(None), type(...), bool, int, float, str, torch.dtype, torch.device, torch.layout)

# Operators whose results, or the sizes of these, depend on values.
_BY_VALUES = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])
_WHOLE = (torch.int32, torch.int64)


class Program:
    """The calls of a function, as code. Calling a program replays them.

    It is valid for tensors with which the function would make the same calls. No call may depend on
    values, so equal sizes, strides and dtypes suffice if the function reads nothing else.
    """

    def __init__(self, graph: fx.Graph) -> None:
        module: Any = fx.GraphModule({}, graph)
        # The function alone: the module would keep the graph, which is many times as large.
        self._run, self._code = type(module).forward, module.code

    def __call__(self, memory: Memory | None, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results for other tensors, with kept rows in given memory."""
        results: tuple[Tensor, ...] = self._run(None, memory, *tensors)
        return results

    def __str__(self) -> str:
        return str(self._code).strip()


def written_down(
    function: Callable[[Memory | None, Sequence[Tensor]], T],
    results: Callable[[T], Sequence[Tensor]],
    memory: Memory | None,
    tensors: Sequence[Tensor],
) -> tuple[T, Program | None]:
    """Calls a function, and records its torch calls.

    Args:
        function: A function of memory and tensors.
        results: The tensors of its result that a program must compute.
        memory: Provides memory for kept tensors, if any.
        tensors: Distinct tensors.

    Returns:
        The result of the function, and a program for it: ``None`` if a call reads values, or a
        tensor that is neither an argument nor computed by such calls.
    """
    writer = _Writer(memory, tensors)
    with undone(partial(setattr, _HERE, "writer", _HERE.writer)):
        _HERE.writer = writer
        with writer, writer.watching:
            value = function(memory and partial(as_one_call, operator.call, memory), tensors)
    return value, writer.program(results(value))


def is_writing() -> bool:
    """Whether this thread is recording a program: no other may be called or recorded meanwhile."""
    return _HERE.writer is not None


def as_one_call(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Calls a function that returns a tensor, as one call of the program being recorded."""
    writer = _HERE.writer
    return function(*arguments) if writer is None else writer.call(function, arguments)


class _Here(threading.local):
    """The state of a thread."""

    writer: _Writer | None = None
    """The active recorder of calls."""


_HERE = _Here()


class _UnwrittenError(Exception):
    """A call cannot be recorded."""


class _Watching(TorchDispatchMode):
    """Notices operators whose sizes or results depend on values, as PyTorch declares."""

    has_seen = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Makes one call."""
        del types
        if not _BY_VALUES.isdisjoint(function.tags):
            is_index = function is torch.ops.aten.index.Tensor
            # PyTorch declares this of indices because some are masks.
            self.has_seen |= not (is_index and all(x is None or x.dtype in _WHOLE for x in args[1]))
        return function(*args, **(kwargs or {}))


class _Writer(TorchFunctionMode):
    """Records the torch calls that are made while it is active.

    When a view is read, one call takes it from the tensor that owns its memory.
    """

    def __init__(self, memory: Memory | None, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._memory = memory, self._graph.placeholder("memory")
        self._nodes: Any = WeakTensorKeyDictionary()  # what computes each tensor
        self._owners: Any = WeakTensorKeyDictionary()  # of views that have no node
        self._is_whole = True
        self.watching = _Watching()  # type: ignore[no-untyped-call]  # as typed in torch
        for number, tensor in enumerate(tensors):
            self._nodes[tensor] = self._graph.placeholder(f"x{number}")

    def call(self, function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
        """Calls a function, and records this as one call, whatever is called inside."""
        with torch._C.DisableTorchFunction():
            result = function(*arguments)
        try:
            self._nodes[result] = self._graph.call_function(function, self._written(arguments))
        except _UnwrittenError:
            self._is_whole = False
        return result

    def program(self, results: Iterable[Tensor]) -> Program | None:
        """The program for some results, if all their calls were recorded."""
        try:
            self._graph.output(self._written(tuple(results)))
            is_whole = self._is_whole and not self.watching.has_seen
            return Program(self._graph) if is_whole else None
        except _UnwrittenError:
            return None

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Makes one call."""
        del types
        result = function(*args, **(kwargs or {}))
        if self._is_whole:
            try:
                self._write(function, args, kwargs or {}, result)
            except _UnwrittenError:
                self._is_whole = False
        return result

    def _write(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any
    ) -> None:
        """Records one call and its result."""
        name = getattr(function, "__name__", "")
        if function in QUESTIONS or self._is_view(name, args, kwargs, found):
            return
        results, changes = list(tensors_in(found)), _changes(name, kwargs)
        if not (results or changes) and next(tensors_in((args, kwargs)), None) is None:
            return  # of shapes or dtypes
        given, named = self._written(args), {k: self._written(x) for k, x in kwargs.items()}
        if name == "__get__":  # an attribute, such as `mT`
            node = self._graph.call_function(getattr, (*given, function.__self__.__name__))
        elif getattr(Tensor, name, None) is function and not name.startswith("__"):
            node = self._graph.call_method(name, given, named)
        elif _is_found(function, name):
            node = self._graph.call_function(function, given, named)
        else:
            raise _UnwrittenError
        if isinstance(found, Tensor):
            self._nodes[found] = node
        elif isinstance(found, (list, tuple)) and results:
            for number, each in enumerate(found):
                if isinstance(each, Tensor):
                    self._nodes[each] = self._graph.call_function(operator.getitem, (node, number))
        elif not (changes and found is None):
            raise _UnwrittenError

    def _is_view(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> bool:
        """Notes the result of a call that gave a view of its first argument, if it did."""
        viewed = args[0] if args else None
        if not (isinstance(found, Tensor) and isinstance(viewed, Tensor)):
            return False
        if _changes(name, kwargs):
            return False
        owner = self._owners.get(viewed, viewed)
        if not _begin_together(found, owner):
            return False
        if found is not viewed:
            self._owners[found] = owner
        return True

    def _written(self, value: Any) -> Any:
        """A value as an argument of the program's calls."""
        if isinstance(value, Tensor):
            if (owner := self._owners.pop(value, None)) is not None:
                node = self._written(owner)
                form = tuple(value.shape), value.stride()
                if form != (tuple(owner.shape), owner.stride()):
                    node = self._graph.call_method("as_strided", (node, *form))
                self._nodes[value] = node
            if value not in self._nodes:
                raise _UnwrittenError
            return self._nodes[value]
        if isinstance(value, (list, tuple)):
            return tuple([self._written(each) for each in value])
        if type(value) in _PLAIN:
            return value
        memory, node = self._memory
        if value is memory:
            return node
        if isinstance(value, slice):
            return slice(*[self._written(x) for x in (value.start, value.stop, value.step)])
        raise _UnwrittenError


def _changes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes a tensor, by the name of the function."""
    is_operator = name == "__setitem__" or (name.startswith("__i") and name.endswith("__"))
    return is_operator or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))


def _is_found(function: Any, name: str) -> bool:
    """Whether code can call a function: `torch.fx` writes module and name of PyTorch functions."""
    if isinstance(function, FunctionType):
        return getattr(sys.modules.get(function.__module__), name, None) is function
    return bool(name) and name != "__set__"


def _begin_together(view: Tensor, owner: Tensor) -> bool:
    """Whether a tensor shares its numbers with another: same dtype, same place in memory."""
    if view.layout != torch.strided or owner.layout != torch.strided or view.dtype != owner.dtype:
        return False
    if view.is_conj() != owner.is_conj() or view.is_neg() != owner.is_neg():
        return False
    is_same = view.untyped_storage()._cdata == owner.untyped_storage()._cdata
    return is_same and view.storage_offset() == owner.storage_offset()
