"""Statuses: whether a tensor is batched, tracked or constant, from its call or from its graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy

from autogram._capture.autograd.graph import is_tap_of, nodes_behind, refuse_reentrant
from autogram._capture.forward.checkpoints import hooks_now
from autogram._capture.forward.decision import NO_BATCH, are_of_samples
from autogram._capture.forward.tapping import Tapping
from autogram._capture.recording import Recording, noted_at
from autogram._capture.tracked import (
    BATCHED,
    UNTAPPED,
    Batched,
    Status,
    Tracked,
    track_parameter,
)

# A tensor, its status, and its version if it has a graph.
_Reference = Callable[[], Tensor | None]
_Mark = tuple[_Reference, Status, int | None]
_NO_MARK: _Mark = (lambda: None, None, None)


class Statuses:
    """The status of tensors, by ``id`` and with weak references.

    A strong reference would keep activations alive that the network has dropped.
    """

    def __init__(self, tapping: Tapping) -> None:
        self._tapping = tapping
        self._marks: dict[int, _Mark] = {}
        self._stand_ins: dict[int, tuple[_Reference, int, Tensor]] = {}
        self._batched_nodes: set[Any] = set()  # of inputs, and of others, that could not be tapped
        self.has_untapped = False  # whether any tensor was untapped: few models have one
        self.batch = NO_BATCH
        self._others: set[Tensor] = set()  # parameters of other models, as far as they are known

    @cached_property
    def _parameters(self) -> dict[int, Tracked]:
        """The trainable parameters that are initialised, by ``id``."""
        names = self._tapping.recording.names
        return {id(p): track_parameter(p) for p in names if p.requires_grad and not is_lazy(p)}

    def parameter(self, tensor: Tensor) -> Tracked | None:
        """The status of a trainable parameter, or ``None`` for any other tensor."""
        self._note_new([tensor])
        return self._parameters.get(id(tensor))

    def _note_new(self, tensors: Iterable[Tensor]) -> None:
        """Notes parameters that are new, or initialised, if some tensors are: by one walk for all.

        Not while gradients are disabled: a module then initialises parameters before it has them.
        """
        unknown = [x for x in tensors if id(x) not in self._parameters and x.requires_grad]
        unknown = [x for x in unknown if self._is_any_parameter(x) and not is_lazy(x)]
        new = [x for x in unknown if x not in self._others]
        if new and torch.is_grad_enabled():
            for parameter in self._tapping.recording.note_new():
                self.add_parameter(parameter)
            self._others.update([x for x in new if id(x) not in self._parameters])

    def _is_any_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter of any model, or is in the place of one."""
        return isinstance(tensor, nn.Parameter) or tensor in self._tapping.recording.names

    @cached_property
    def _inner(self) -> dict[Any, Tensor]:
        """Parameters that are no leaves, as where a compiled part is traced, by their nodes."""
        names = self._tapping.recording.names
        return {p.grad_fn: p for p in names if not p.is_leaf}

    def add_parameter(self, parameter: Tensor) -> None:
        """Adds a tensor that is a parameter from now on."""
        is_known = id(parameter) in self._parameters
        if parameter.requires_grad and not is_known and not is_lazy(parameter):
            self._parameters[id(parameter)] = track_parameter(parameter)

    def set(self, tensor: Tensor, status: Status) -> None:
        """Remembers the status of a tensor as it is now."""
        version = None if tensor.is_leaf else tensor._version
        self._marks[id(tensor)] = (weakref.ref(tensor), status, version)
        if status is UNTAPPED:
            self.has_untapped = True

    def let_be(self, tensor: Tensor, status: Status) -> None:
        """Gives a stand-in the status of the tensor that it replaces, also if it is a leaf."""
        if isinstance(status, Tracked):
            self._parameters[id(tensor)] = status
            self._inner[tensor.grad_fn] = tensor
        else:
            self.set(tensor, status)

    def read(self, arguments: Iterable[Any]) -> list[tuple[Tensor, Status]]:
        """The tensors among the arguments of a call, also in lists and tuples, with statuses."""
        found: list[tuple[Tensor, Status]] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                found.append((argument, self.of(argument)))
            elif isinstance(argument, (list, tuple)):
                found.extend(self.read(argument))
        return found

    def tap_reads(self, reads: list[tuple[Tensor, Status]], changed: Any) -> dict[int, Tensor]:
        """Puts taps on what a call reads that has none, if the call reads tracked tensors, too.

        The tap of a use hides the nodes behind it from the search for the uses of single nodes.
        What no use reads is left to that search, which finds the factors of these uses. Returns
        stand-ins by the ``id`` of what each stands for. The tensor that the call has ``changed`` in
        place has none.
        """
        stand_ins: dict[int, Tensor] = {}
        if any(isinstance(status, Tracked) for _, status in reads):
            for i, (x, status) in enumerate(reads):
                tapped, own = self.tapped(x) if status is UNTAPPED else (x, status)
                if tapped is x:
                    reads[i] = x, own
                elif x is not changed:
                    reads[i], stand_ins[id(x)] = (tapped, own), tapped
        return stand_ins

    def tapped(self, tensor: Tensor) -> tuple[Tensor, Status]:
        """A tensor that calls may read, and its status, with a tap if parameters are behind it.

        It is the tensor itself, or takes its place where the tensor must not be changed.
        """
        status = self.of(tensor)
        if status is UNTAPPED:
            status = self._adopt(tensor)
        return (tensor, status) if status is not UNTAPPED else (self._stand_in(tensor), BATCHED)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """A tensor with a tap that takes the place of one that must not be changed."""
        of, version, known = self._stand_ins.get(id(tensor), (lambda: None, 0, tensor))
        if of() is tensor and version == tensor._version:
            return known
        sources, _ = self.untapped_parameters(tensor)
        found = self._tapping.tap_unseen(tensor, sources, in_place=False)
        self._stand_ins[id(tensor)] = weakref.ref(tensor), tensor._version, found
        return found

    def of(self, tensor: Tensor) -> Status:
        """The status of a tensor.

        A tensor that was never seen is a constant, unless it has an autograd node. A status that
        was noted is stale where a view of the tensor was changed in place, a derived tensor was
        detached, or a custom autograd Function has put the result of its own calls into the graph.
        """
        if (parameter := self._parameters.get(id(tensor))) is not None:
            is_frozen = not tensor.requires_grad and self._is_any_parameter(tensor)
            return None if is_frozen else parameter
        reference, status, version = self._marks.get(id(tensor), _NO_MARK)
        if reference() is not tensor:
            status = version = None
        if tensor.is_leaf:
            if tensor.requires_grad and (parameter := self.parameter(tensor)) is not None:
                return parameter  # is new, and a call may have marked it before
            return None if isinstance(status, Tracked) else status
        return status if version == tensor._version else self._adopt(tensor)

    def alive(self) -> list[tuple[Tensor, Status]]:
        """The tensors that are alive and have a status which was noted, and these statuses."""
        found = [(reference(), status) for reference, status, _ in self._marks.values()]
        return [(tensor, status) for tensor, status in found if tensor is not None]

    def is_batched(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on samples, as far as calls that read it are concerned."""
        status = self.of(tensor)
        if status is UNTAPPED:
            sources, are_samples_behind = self.untapped_parameters(tensor)
            return are_samples_behind or not sources
        return status is BATCHED

    def untapped_parameters(self, tensor: Tensor) -> tuple[dict[Tensor, Tracked], bool]:
        """The parameters behind a tensor on paths without a tap, and whether samples are behind it.

        These are behind each tap, and behind inputs that no tap could be put on.
        """
        # The tap of an in-place call that may cover only a slice is hidden behind another node.
        channel = self._tapping.recording.channel
        is_end = partial(is_tap_of, channel)
        variables: list[Tensor] = []
        are_samples_behind = False
        for node in nodes_behind(tensor, is_end):
            if channel.has_noted and (earlier := noted_at(node, channel)) is not None:
                self._join(earlier)
            refuse_reentrant(node)
            are_samples_behind |= node in self._batched_nodes or is_end(node)
            variable: Tensor | None = getattr(node, "variable", self._inner.get(node))
            if variable is not None:
                variables.append(variable)
        self._note_new(variables)
        sources = {x: tracked for x in variables if (tracked := self.parameter(x))}
        return sources, are_samples_behind

    def _join(self, earlier: Recording) -> None:
        """Notes an earlier forward pass, whose parameters are parameters of this one, too."""
        recording = self._tapping.recording
        if earlier is recording or earlier in recording.earlier:
            return
        recording.join(earlier)
        for parameter in earlier.names:
            self.add_parameter(parameter)

    def _adopt(self, tensor: Tensor) -> Status:
        """The status of a tensor that comes from a call which the recorder could not see.

        If the call read parameters, the tensor is derived from these. If it read batched tensors,
        too, the call is a use, and its result is tapped here, or by a use that reads it.
        """
        sources, are_samples_behind = self.untapped_parameters(tensor)
        if not sources or are_samples_behind or self._may_hide_samples(tensor, sources):
            return self.adopt_batched(tensor, sources)
        status = Tracked.of(tensor, tuple(sources))
        self.set(tensor, status)
        return status

    def _may_hide_samples(self, tensor: Tensor, sources: Mapping[Tensor, Tracked]) -> bool:
        """Whether a call that was not recorded may have read samples that need no gradient.

        Such samples have no node by which they would be known, as where a custom autograd Function
        is the first layer. Taken for derived from parameters alone, its result would hide all
        uses behind. Where no call of the Function's own has shown samples, sizes tell, which is a
        guess. The second run of a checkpoint, which hooks show, may know other inputs.
        """
        reference, status, version = self._marks.get(id(tensor), _NO_MARK)
        if reference() is tensor:
            return status is BATCHED and version is None  # as it was before it got a node
        batch = self.batch
        if batch.samples in (0, 1) or hooks_now(True) is not None:
            return False
        if not are_of_samples(tensor, batch) or not sources.keys().isdisjoint(batch.unspread):
            return False
        nodes = [*nodes_behind(tensor, partial(is_tap_of, self._tapping.recording.channel))]
        functions = [node for node in nodes if isinstance(node, BackwardCFunction)]
        # Other calls have such an edge for a number, too.
        edges = [edge for node in functions or nodes for edge in node.next_functions]
        if not any(following is None for following, _ in edges):
            return False
        self._tapping.note_guess([*sources.values()])
        return True

    def adopt_batched(self, tensor: Tensor, sources: Mapping[Tensor, Tracked]) -> Batched:
        """The status of a batched tensor, which is tapped here if parameters are behind it."""
        status = BATCHED
        if sources and not torch.is_grad_enabled():
            return BATCHED  # its tap waits for a call whose gradient is recorded, as its own is
        if sources and _may_be_changed(tensor):
            self._tapping.tap_unseen(tensor, sources)
        elif sources:
            status = UNTAPPED
            self._batched_nodes.add(tensor.grad_fn)
        self.set(tensor, status)
        return status


def _may_be_changed(tensor: Tensor) -> bool:
    """Whether a tap may be put on a tensor in place.

    PyTorch refuses to change elements that share their memory, views that one call gave with
    others, and views that a custom autograd Function returned. And a view that was made before its
    base was tapped leads past that tap; with a tap of its own it would have a part in both.
    """
    shares = tensor.layout == torch.strided and torch._debug_has_internal_overlap(tensor) == 1
    return tensor._base is None and not shares
