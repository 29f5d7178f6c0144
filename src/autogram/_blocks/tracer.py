"""The tracer: writes down the calls to PyTorch that a function makes, as a program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from autogram._blocks.program import Call, Program, Slot, exchange, leaves, without_repetitions

# Questions that the form of a tensor answers. Other answers may depend on its values.
_PROPERTIES = "shape dtype device ndim layout is_cuda"
_METHODS = "size dim numel stride is_contiguous is_floating_point is_complex element_size __len__"
GEOMETRY = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
}


class _View(NamedTuple):
    """A tensor that lies in the memory of another one, or is that tensor."""

    root: int
    """The place of that one."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Where it begins in its storage."""
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, root: int) -> _View:
        """The view that a tensor is."""
        offset = int(tensor.storage_offset())
        return cls(root, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)


class Tracer(TorchFunctionMode):
    """Notes every call while it is active.

    Views are not made one after the other: a chain of them is one, made when a call reads it, and
    nothing where it has the form of the tensor itself. What is computed twice from the same tensors
    is computed once, unless their memory or that of the result is changed, or is returned.

    Args:
        inputs: The tensors and the memory that the function is given.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._inputs = inputs
        self._calls: list[Call] = []
        self._places = len(inputs)
        # By `id`, and with a weak reference that tells whether it is still that of this tensor.
        self._known: dict[int, tuple[weakref.ref[Tensor], _View]] = {}
        self._roots: dict[int, _View] = {}
        self._made: dict[_View, int] = {}
        # By the place of a result: where it and what it was computed from lie, views left out.
        self._storages: dict[int, set[StorageWeakRef]] = {}
        self._changed: set[StorageWeakRef] = set()
        self._is_settled = True
        for place, x in enumerate(inputs):
            if isinstance(x, Tensor) and id(x) not in self._known:
                self._place(x, place)

    @staticmethod
    def is_active() -> bool:
        """Whether calls of this thread are noted."""
        modes = _get_current_function_mode_stack()
        return any(isinstance(mode, Tracer) for mode in modes)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carries out one call, and notes it."""
        del types
        kwargs = kwargs or {}
        if function in GEOMETRY:
            return function(*args, **kwargs)
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        versions = [x._version for x in given]
        slots, named = exchange((args, kwargs), self._slot)  # of what is there before the call
        found = function(*args, **kwargs)
        if versions != [x._version for x in given]:
            self._calls.append(Call(function, slots, named, None))
            self._is_settled &= found is None or id(found) in map(id, given)
            pairs = zip(given, versions, strict=True)
            self._changed.update(_storage(x) for x, version in pairs if x._version != version)
        elif not args or not self._is_view(found, args[0]):
            place = self._new_place()
            self._calls.append(Call(function, slots, named, place))
            tensors = [x for x in leaves((found, given)) if isinstance(x, Tensor)]
            self._storages[place] = {_storage(x) for x in tensors}
            self._note(found, place)
        return found

    def program(self, result: Tensor | tuple[Tensor, ...]) -> Program | None:
        """What was traced, or ``None`` if it may be something else another time."""
        slots = exchange(result, self._slot)
        if not self._is_settled:
            return None
        kept = self._changed.union(_storage(x) for x in leaves(result))
        shared = {place for place, found in self._storages.items() if found.isdisjoint(kept)}
        calls = without_repetitions(self._calls, shared)
        return Program(calls, len(self._inputs), self._places, slots)

    def _note(self, found: Any, place: int) -> None:
        """Notes what a call has computed."""
        if isinstance(found, Tensor):
            self._place(found, place)
        elif isinstance(found, (list, tuple)) and {Tensor} >= {type(x) for x in found}:
            for i, x in enumerate(found):
                part = self._new_place()
                self._calls.append(Call(getitem, (Slot(place), i), {}, part))
                self._storages[part] = set()
                self._place(x, part)
        else:
            self._is_settled = False  # a number, say, by which the function may go on

    def _is_view(self, found: Any, source: Any) -> bool:
        """Whether a call has returned its first argument or a view of it, which is then known."""
        if found is source:
            return isinstance(source, Tensor)
        known = self._known.get(id(source))
        if known is None or not isinstance(found, Tensor) or not found._is_view():
            return False
        view = _View.of(found, known[1].root)
        if (
            _storage(found) != _storage(source)
            or view.dtype != known[1].dtype
            or found.is_conj()
            or found.is_neg()
        ):
            return False
        self._known[id(found)] = weakref.ref(found), view
        return True

    def _place(self, tensor: Tensor, place: int) -> None:
        """Remembers the place of a tensor."""
        view = self._roots[place] = _View.of(tensor, place)
        self._made[view] = place
        self._known[id(tensor)] = weakref.ref(tensor), view

    def _slot(self, x: Any) -> Any:
        """The slot of a tensor or of memory, and anything else as it is."""
        if isinstance(x, slice):
            self._is_settled &= not any(isinstance(y, Tensor) for y in (x.start, x.stop, x.step))
        if not isinstance(x, Tensor):
            places = (place for place, given in enumerate(self._inputs) if given is x)
            place = next(places, None) if callable(x) else None
            return x if place is None else Slot(place)
        known = self._known.get(id(x))
        if known is None or known[0]() is not x:
            self._is_settled = False  # it comes from elsewhere
            return x
        return Slot(self._make(known[1]))

    def _make(self, view: _View) -> int:
        """The place of a view, after a call that makes it where there is none."""
        if view not in self._made:
            place = self._made[view] = self._new_place()
            shift = view.offset - self._roots[view.root].offset
            args = (Slot(view.root), view.shape, view.strides)
            function = _shifted if shift else torch.as_strided
            self._calls.append(Call(function, (*args, shift) if shift else args, {}, place))
            self._storages[place] = set()
        return self._made[view]

    def _new_place(self) -> int:
        """A place that nothing has."""
        self._places += 1
        return self._places - 1


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Which storage a tensor lies in: an address that none takes again while this is there."""
    return StorageWeakRef(tensor.untyped_storage())


def _shifted(root: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], shift: int) -> Tensor:
    """A view that begins behind the first element of its root."""
    return root.as_strided(shape, strides, int(root.storage_offset()) + shift)
