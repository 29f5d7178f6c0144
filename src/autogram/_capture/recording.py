"""Recordings: what remains of a forward pass, and the channel between an engine and its taps."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from autogram._capture.from_graph import switch
from autogram.errors import UnsupportedError, listed

# Called with the use, the tensors that its tap saved, and the cotangent (k, *output).
Receiver = Callable[[Any, tuple[Tensor, ...], Tensor], None]

InputSizes = Sequence[Sequence[int]]
"""The sizes of each input's dimensions in which samples may be."""


class Counted(NamedTuple):
    """How many samples a forward pass was taken to have."""

    module: int
    """The ``id`` of the outermost module. To use one again costs time, never correctness."""
    inputs: InputSizes
    samples: int


class Counting:
    """By which dimension of which input samples are counted, for the modules of an engine.

    It is the first dimension of the first input, unless losses have shown that it is another one:
    models may be given a graph's edges, points in time or the names of classes first. Losses may
    also be as many as something else by accident. So each place is tried once, and left again if it
    does not help.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}  # by module: an input and its dimension
        self._tried: set[tuple[int, tuple[int, int]]] = set()
        self._proven: set[int] = set()

    def count(self, module: int, inputs: InputSizes) -> Counted:
        """How many samples inputs have. There is one where nothing is known."""
        number, dim = self._places.get(module, (len(inputs), 0))
        if number < len(inputs) and dim < len(inputs[number]):
            return Counted(module, inputs, inputs[number][dim])
        likely = (sizes[0] for sizes in inputs if sizes and sizes[0] != 1)
        return Counted(module, inputs, next(likely, 1))

    def learn(self, passes: Iterable[Recording], samples: int, *, are_apart: bool) -> bool:
        """Notes how many ``samples`` losses had, and whether each loss was of one sample.

        Returns whether later passes are counted anew.
        """
        is_anew = False
        for counted in (of.counted for of in passes if of.counted is not None):
            module = counted.module
            if samples != counted.samples:
                is_anew |= self._tries_another(counted, samples)
            elif are_apart:
                self._proven.add(module)
            elif module not in self._proven:
                self._places.pop(module, None)
        return is_anew

    def _tries_another(self, counted: Counted, samples: int) -> bool:
        """Lets another place count that has so many samples. Returns whether there is one."""
        module, inputs = counted.module, counted.inputs
        dims = [(i, d) for d in (0, 1) for i, of in enumerate(inputs) if samples in of[d : d + 1]]
        for place in dims if samples > 1 else ():
            if (module, place) not in self._tried:
                self._tried.add((module, place))
                self._places[module] = place
                self._proven.discard(module)
                return True
        return False


class Channel:
    """The connection between an engine and the taps of its graphs.

    Attributes:
        parameters_now: Gives the parameters of the engine's modules, with their names.
        left_out_now: Gives the parameters that modules with inactive hooks keep out of J.
        anchor: An input of every tap, whose gradient is never produced. Differentiating with
            respect to the anchor visits exactly the taps that the losses depend on.
        unspread: Names of parameters that are expanded over something else than the samples, which
            once had the same size.
        counting: By which inputs the samples of modules are counted.
        guesses_inputs: Whether inputs are taken for batched that have other sizes than the first
            one, but may have parts of samples.
        told: The warnings that the user was given, each of which is given once.
        listener: Is shown the columns of each parameter as soon as they are complete, if not
            ``None``.
        before_pass: Is called before each pass that is inside of no other, if passes communicate
            with other processes.
        shard_of: Gives the sharded parameter of some name, or ``None`` if it is not sharded.
        has_noted: Whether a forward pass was ever noted at nodes of its graph.
        reads_graph: Whether uses are read from the graph, and no forward pass is recorded.
    """

    def __init__(
        self,
        parameters_now: Callable[[], dict[Tensor, str]] = dict,
        left_out_now: Callable[[], dict[Tensor, str]] = dict,
    ) -> None:
        self.parameters_now = parameters_now
        self.left_out_now = left_out_now
        with torch.inference_mode(mode=False):  # where a tensor has no node in the graph
            self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._recordings: WeakSet[Recording] = WeakSet()
        self._lock = threading.RLock()  # several threads may record
        self.unspread: set[str] = set()
        self.counting = Counting()
        self.guesses_inputs = True
        self.told: set[str] = set()
        self.listener: Any = None
        self.before_pass: Callable[[], None] | None = None
        self.shard_of: Callable[[str], Tensor | None] = lambda _: None
        self.has_noted = False
        self.reads_graph = switch.is_on

    def begin(self) -> Recording:
        """Begins a recording, of the parameters as they are now."""
        names, left_out = self.parameters_now(), self.left_out_now()
        if left_out:
            names = {p: name for p, name in names.items() if p not in left_out}
        _refuse_sparse(names)
        recording = Recording(self, names, left_out)
        with self._lock:
            self._recordings.add(recording)
        return recording

    @property
    def recordings(self) -> list[Recording]:
        """The recordings whose graph is still alive."""
        with self._lock:
            return list(self._recordings)

    @property
    def is_batchable(self) -> bool:
        """Whether backward passes through the recordings that are alive may be batched."""
        if self.before_pass is not None:
            return False
        return all(recording.is_batchable for recording in self.recordings)

    def parameters(
        self, known: Iterable[Tensor] = (), recordings: Iterable[Recording] = ()
    ) -> dict[Tensor, str]:
        """The parameters of the engine's modules, with their names.

        They are the parameters at the beginning of some ``recordings``, by default of all that are
        alive. If there are none, or others are ``known`` to be used, those of now are added.
        """
        names: dict[Tensor, str] = {}
        for recording in recordings or self.recordings:
            names = recording.names | names
        if not names or not names.keys() >= set(known):
            names = self.parameters_now() | names
        return names

    def refuse_frozen(self, inside: Mapping[Tensor, str]) -> None:
        """Refuses parameters of J that were frozen since the losses were computed."""
        pairs = ((self.shard_of(name), p, name) for p, name in inside.items())
        frozen = [
            name for shard, p, name in pairs if not (p if shard is None else shard).requires_grad
        ]
        if frozen:
            raise UnsupportedError(
                "Parameters that the losses depend on were frozen after the forward pass: "
                f"{listed([f'`{name}`' for name in frozen])}. J has columns for them, but a "
                "backward pass would give them no gradient: the weights would not fit the "
                "gradient. Call `requires_grad_(False)` before the forward pass, or after the "
                "step."
            )

    def names(
        self,
        reached: Mapping[Tensor, object],
        recordings: Iterable[Recording],
        left_out: Collection[Tensor],
    ) -> dict[Tensor, str]:
        """The trainable parameters of the engine's modules, in order, with unique names.

        Parameters ``left_out`` are missing. Where `functional_call` puts other tensors in the place
        of parameters, several tensors may have one name. All that are ``reached`` are listed, and
        others only if no other has the name. The others are those of the ``recordings`` of some
        losses, or those of now if there are none: other graphs may have had other parameters.
        """
        others: dict[Tensor, str] = {}
        for recording in recordings:
            others |= recording.names
        known = others = others or self.parameters_now()
        if not reached.keys() <= others.keys():
            found = self.parameters(reached)
            known = others | {p: name for p, name in found.items() if p in reached}
        known = {p: name for p, name in known.items() if p not in left_out}
        of_reached = {name for parameter, name in known.items() if parameter in reached}
        seen: Counter[str] = Counter()
        names: dict[Tensor, str] = {}
        for parameter, name in known.items():
            is_free = parameter.requires_grad and name not in of_reached and name not in seen
            # A parameter that is lazy would have no number of columns.
            if parameter in reached or (is_free and not is_lazy(parameter)):
                seen[name] += 1
                names[parameter] = name if seen[name] == 1 else f"{name}#{seen[name]}"
        return names


@dataclass(eq=False)
class Recording:
    """What remains of one recorded forward pass. Its graph keeps it alive, by taps and notes."""

    channel: Channel
    names: dict[Tensor, str]
    """The parameters of the modules, by tensor."""
    left_out: dict[Tensor, str] = field(default_factory=dict)
    """The parameters that modules with inactive hooks keep out of J."""
    counted: Counted | None = None
    """How many samples there are, by the inputs of the outermost module."""
    is_guess: bool = False
    """Whether an input was taken for batched that may be a constant."""
    count: int = 0
    """How many uses there are."""
    guesses: set[str] = field(default_factory=set)
    """Names of parameters that are used where nothing but a size has told that samples are."""
    is_batchable: bool = True
    """Whether backward passes through the graph may be batched."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """The dtypes in which autocast carried out uses, whatever the dtype of their outputs."""
    wrappers: dict[Any, int] = field(default_factory=dict)
    """Weak references to the DistributedDataParallel modules that ran the forward pass, and a mark
    of what each had exchanged before: zero if it does not exchange gradients behind the pass."""
    retained: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Activations whose gradient the user has asked to keep."""
    freed_by: str = ""
    """The call of an engine, if any, whose pass was told not to keep the graph."""
    noted: set[int] = field(default_factory=set)
    """The numbers of the nodes at which the pass is noted, each of which its thread gives once."""
    earlier: dict[Recording, None] = field(default_factory=dict)
    """Forward passes of which this one has read results that no tap was on."""

    def note_at(self, result: Tensor) -> None:
        """Notes the forward pass in the graph of a result on which no tap is.

        Nothing else records which parameters this pass had, and which of them are part of J.
        Where a view's base is changed in place, PyTorch gives the view another node.
        """
        for tensor in (result, result._base):
            if tensor is None or tensor.grad_fn is None or tensor in self.names:
                return  # the graph of a parameter that is no leaf would hold what holds it
            node: Any = tensor.grad_fn
            node.metadata.setdefault(self.channel, self)
            self.noted.add(node._sequence_nr())
            self.channel.has_noted = True

    def join(self, earlier: Recording) -> None:
        """Notes that the forward pass reads what is noted as a result of an earlier one."""
        self.earlier.update({earlier: None, **earlier.earlier})
        self.names = earlier.names | self.names

    def note_new(self) -> Iterable[Tensor]:
        """Notes parameters that became part of the modules since the recording began.

        Returns all parameters: others may have begun to require a gradient. Those of shards are
        noted when they are whole, in place of the shards.
        """
        if self.channel.before_pass is not None:
            return ()
        left_out = self.channel.left_out_now()
        now = self.channel.parameters_now().items()
        self.names = {p: name for p, name in now if p not in left_out} | self.names
        return self.names


def noted_among(nodes: Iterable[Any], channel: Channel) -> list[tuple[Any, Recording]]:
    """The nodes among some at which a forward pass of an engine is noted, with the pass.

    To ask a node for its notes makes room for them, which takes a hundred times as long as to ask
    for its number.
    """
    noted = set[int]().union(*[recording.noted for recording in channel.recordings])
    likely = [node for node in nodes if node._sequence_nr() in noted]
    return [(node, of) for node in likely if (of := noted_at(node, channel)) is not None]


def noted_at(node: Any, channel: Channel) -> Recording | None:
    """The forward pass of an engine that is noted at a node. Ask where `has_noted` says so."""
    found: Recording | None = node.metadata.get(channel)
    return found


def _refuse_sparse(parameters: Mapping[Tensor, str]) -> None:
    """Refuses trainable parameters that are sparse."""
    for parameter, name in parameters.items():
        if parameter.requires_grad and parameter.layout != torch.strided:
            raise UnsupportedError(
                f"The parameter `{name}` is sparse ({parameter.layout}). Keep its values as a "
                "dense parameter, and make the sparse tensor from these in the forward pass, for "
                "instance with `torch.sparse_coo_tensor(indices, values, shape)`."
            )
