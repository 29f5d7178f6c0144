"""Recordings: what remains of a recorded forward pass."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from autogram._capture.forward.calls import Call

# Called with the use, the tensors that its tap saved, and the cotangent (k, *output).
Receiver = Callable[[Any, tuple[Tensor, ...], Tensor], None]

# A module and the shapes of its inputs.
Entry = tuple[int, tuple[tuple[int, ...], ...]]


def entry_of(module: nn.Module | None, inputs: Sequence[Tensor]) -> Entry:
    """What a module and its inputs are known again by."""
    return id(module), tuple(() if x.is_nested else tuple(x.shape) for x in inputs)


class Alive(WeakSet["Recording"]):
    """The recordings that are alive. Several threads may add to them, and look at them."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()

    def add(self, item: Recording) -> None:
        """Adds a recording."""
        with self._lock:
            super().add(item)

    def __iter__(self) -> Iterator[Recording]:
        with self._lock:
            found = list(super().__iter__())
        return iter(found)


class Channel:
    """What an engine and the taps of its graphs share.

    Attributes:
        parameters_now: Gives the parameters of the engine's modules, with their names. To look
            takes some time.
        anchor: An input of every tap, whose gradient is never produced. Differentiating with
            respect to it visits exactly the taps that the losses depend on.
        recordings: Those whose graph is still alive.
        by_element: Uses, by their number and their function, whose samples once had no places along
            any dimension. They are looked at element by element.
        told: The warnings that the user was given, of which each comes once.
    """

    def __init__(self, parameters_now: Callable[[], dict[Tensor, str]] = dict) -> None:
        self.parameters_now = parameters_now
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self.recordings = Alive()
        self.by_element: set[tuple[int, str]] = set()
        self.told: set[str] = set()

    @property
    def is_batchable(self) -> bool:
        """Whether backward passes through the recordings that are alive may be batched."""
        return all(recording.is_batchable for recording in self.recordings)

    def was_derived(self, entry: Entry, place: int) -> bool:
        """Whether an input of a module in a checkpoint was computed from parameters alone."""
        return any(place in recording.entries.get(entry, ()) for recording in self.recordings)

    def parameters(self, known: Iterable[Tensor] = ()) -> dict[Tensor, str]:
        """The parameters of the engine's modules, with their names.

        As they were when the recordings that are alive began, or where there are none, and where
        others are ``known`` to be used, as they are now.
        """
        names: dict[Tensor, str] = {}
        for recording in self.recordings:
            names = {**recording.names, **names}
        if not names or not names.keys() >= set(known):
            names = {**self.parameters_now(), **names}
        return names

    def names(self, reached: Mapping[Tensor, object]) -> dict[Tensor, str]:
        """The trainable parameters of the engine's modules, in order, with unique names.

        Where `functional_call` puts other tensors in the place of parameters, one name may belong
        to several. Those that are ``reached`` are all listed, and others only if a name is free.
        """
        found = self.parameters(reached)
        of_reached = {name for parameter, name in found.items() if parameter in reached}
        seen: Counter[str] = Counter()
        names: dict[Tensor, str] = {}
        for parameter, name in found.items():
            is_free = parameter.requires_grad and name not in of_reached and not seen[name]
            if parameter in reached or is_free:
                seen[name] += 1
                names[parameter] = name if seen[name] == 1 else f"{name}#{seen[name]}"
        return names


@dataclass(eq=False)
class Recording:
    """What remains of one recorded forward pass. The taps of its graph keep it alive."""

    channel: Channel
    names: dict[Tensor, str]
    """The parameters of the modules, by tensor."""
    sizes: frozenset[int] = frozenset()
    """Those of the inputs of the outermost module, in dimensions in which the samples may lie."""
    count: int = 0
    """How many uses there are."""
    is_batchable: bool = True
    """Whether a backward pass through it may be batched."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """Those in which autocast carried out uses, whatever the dtype of their outputs."""
    is_exchanged: bool = False
    """Whether DistributedDataParallel exchanges its gradients in an ordinary backward pass."""
    retained: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Activations whose gradient the user has asked to keep."""
    entries: dict[Entry, frozenset[int]] = field(default_factory=dict)
    """Which inputs of modules in checkpoints were computed from parameters alone.

    A checkpoint gives other tensors to these modules when it runs them again, and what lies between
    it and them is not recorded then: the graph behind a tensor does not tell whether samples are in
    it, too.
    """

    def note(self, call: Call) -> None:
        """Takes in a call by which the user may see the cotangent of a tensor."""
        self.is_batchable = False  # or the user would see the hidden dimension
        if call.kind.name == "retain_grad":
            self.retained.append(weakref.ref(call.args[0]))

    def enter(self, entry: Entry, derived: frozenset[int]) -> None:
        """Notes which inputs of a module in a checkpoint were computed from parameters alone."""
        before = self.entries.setdefault(entry, derived)
        self.entries[entry] = before & derived  # if they differ, nothing can be said
