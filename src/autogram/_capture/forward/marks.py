"""Marks: what the recorder knows of the tensors that it has seen."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from autogram._capture.tracked import Tracked, track_parameter


class Batched:
    """The status of a tensor that depends on the inputs of the modules."""


class Unknown:
    """The status of a tensor that was computed by a call that was not seen."""


BATCHED = Batched()
UNKNOWN = Unknown()
Status = Tracked | Batched | None  # the last for a constant


class Marks:
    """The status of tensors, by ``id`` and with weak references.

    Tensors have no cheaper identity, and a strong reference would keep activations alive that the
    network has dropped. An ``id`` that is taken again by another tensor is seen by the reference.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(p): track_parameter(p) for p in parameters if p.requires_grad}
        self._marks: dict[int, tuple[weakref.ref[Tensor], Status, int, bool]] = {}

    def parameter(self, tensor: Tensor) -> Tracked | None:
        """The record of a trainable parameter, or ``None`` for any other tensor."""
        return self._parameters.get(id(tensor))

    def set(self, tensor: Tensor, status: Status) -> None:
        """Remembers the status of a tensor as it is now."""
        has_graph = not tensor.is_leaf
        self._marks[id(tensor)] = (weakref.ref(tensor), status, tensor._version, has_graph)

    def get(self, tensor: Tensor) -> Status | Unknown:
        """The status of a tensor, as far as it is known.

        A tensor that was never seen is a constant, unless autograd says that it was computed. A
        mark is stale where a view of the tensor was changed in place, or where a custom autograd
        Function has made the result of its own, unrecorded calls a part of the graph.
        """
        key = id(tensor)
        parameter = self._parameters.get(key)
        if parameter is not None:
            return parameter
        mark = self._marks.get(key)
        if mark is not None and mark[0]() is tensor:
            _, status, version, had_graph = mark
            if (had_graph and tensor._version == version) or tensor.is_leaf:
                return status
        return None if tensor.is_leaf else UNKNOWN

    def clear(self) -> None:
        """Forgets all but the parameters."""
        self._marks.clear()
