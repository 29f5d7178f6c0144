"""Recording while AOTAutograd traces: the uses of a compiled region, found once, as in eager mode.

AOTAutograd runs the graph of a region with live autograd, so that the recorder sees each torch
function, asks the rules, and puts taps on results. The taps become operators of the joint graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from autogram._capture.forward.calls import Kind
from autogram._capture.forward.decision import Batch, Decision, Reads, UseRows, UseRule, decide
from autogram._capture.forward.recorder import Recorder
from autogram._capture.forward.tapping import Tapping
from autogram._capture.recording import Channel, Recording
from autogram._capture.tracked import BATCHED, Status, Tracked, base_of
from autogram._capture.uses import RuleUse, Use
from autogram._compiled.tracing.derivation import Derivation, History
from autogram._compiled.tracing.operator import TracedTap
from autogram._compiled.tracing.sizes import OpenBatch
from autogram._containers import tensors_in


class PartInputs(NamedTuple):
    """The kinds of a region's inputs when it is compiled, by position."""

    parameters: Sequence[int]
    derived: Sequence[int]  # from parameters, outside of the region
    batched: Sequence[int]  # dependent on the samples
    samples: int  # number of samples; 1 disables the detection of expanded parameters


class TracedTapping(Tapping):
    """Puts taps into the joint graph, and notes calls without a rule.

    The attributes of a :class:`Part` are made from those with the same names.

    Attributes:
        derivations: How to compute the derived tensors that are used.
        outputs: As in the part. Outputs that share memory are computed together.
        without_rule: Names of calls, each with a parameter that it reads.
    """

    def __init__(self, recording: Recording, history: History) -> None:
        super().__init__(recording)
        self._history = history
        self.uses: list[RuleUse] = []
        self.derivations: dict[Tracked, Derivation] = {}
        self.outputs: dict[tuple[int, ...], Derivation] = {}
        self.without_rule: list[tuple[str, Tensor]] = []
        self.guesses: set[Tensor] = set()

    def run_with_rule(
        self, kind: Kind, args: Any, kwargs: dict[str, Any], decision: UseRule
    ) -> Any:
        """Carries out a call with a rule, if its derived tensors can be computed again."""
        answers = chain(*decision.answers.values())
        read = {t for operands, _ in answers for t in operands if t is not None}
        derived = {t for t in read if t.edge is not None and t not in self.derivations}
        if derived:
            given = [x for x in tensors_in((args, kwargs)) if x.grad_fn is not None]
            by_edge = {get_gradient_edge(x): x for x in given}
            found = {t: self._history.of(by_edge[t.edge]) for t in derived if t.edge in by_edge}
            if len(found) < len(derived) or None in found.values():
                reads = [(x, t) for t in read for x in t.sources]
                return self.run_without_rule(kind, args, kwargs, reads)
            self.derivations.update({t: way for t, way in found.items() if way is not None})
        return super().run_with_rule(kind, args, kwargs, decision)

    def note_guess(self, reads: Sequence[Tracked]) -> None:
        """Notes parameters whose use assumes samples because of a size alone."""
        self.guesses.update(p for tracked in reads for p in tracked.sources)

    def run_without_rule(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], reads: Reads
    ) -> Any:
        """Carries out a call unchanged. Its parameters get rows through the whole region."""
        self.without_rule += [(kind.name, p) for _, tracked in reads for p in tracked.sources]
        return kind.function(*args, **kwargs)

    def tap_unseen(self, tensor: Tensor, sources: Any, *, in_place: bool = True) -> Tensor:
        """Notes parameters that were used where even tracing sees no calls."""
        del in_place
        name = f"the call behind {type(tensor.grad_fn).__name__}"
        self.without_rule += [(name, p) for tracked in sources.values() for p in tracked.sources]
        return tensor

    def tap(
        self, use: Use, output: Tensor, saved: Sequence[Tensor], *, in_place: bool = False
    ) -> Tensor:
        """A tensor tapped in the joint graph."""
        assert isinstance(use, RuleUse)
        self.uses.append(use)
        self.recording.count += 1
        if not in_place:
            tapped: Tensor = TracedTap.apply(output, use, *saved)  # type: ignore[no-untyped-call]  # as typed in torch
            return tapped
        # AOTAutograd makes this functional. The values that the call saved of its result stay.
        with torch.autograd._unsafe_preserve_version_counter(output):  # type: ignore[attr-defined]  # as exported
            output.copy_(TracedTap.apply(output.clone(), use, *saved))  # type: ignore[no-untyped-call]  # as typed in torch
        return output


# Calls that need a tensor's values on the host.
_READS_VALUES = {
    *(torch.equal, Tensor.equal, Tensor.item, Tensor.tolist, Tensor.numpy),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__),
}


class _ValuesError(Exception):
    """A rule has read values."""


class _WithoutValues(TorchFunctionMode):
    """Refuses calls that read values: a tracing has none, or would make symbols of them."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carries out a call, or refuses it."""
        del types
        if function in _READS_VALUES:
            raise _ValuesError
        return function(*args, **(kwargs or {}))


class TraceRecorder(Recorder):
    """The recorder of one tracing of a region, with the known facts about the samples."""

    tapping: TracedTapping

    def __init__(self, tapping: TracedTapping, batch: Batch) -> None:
        super().__init__(tapping)
        self._batch = batch

    def statuses_of(self, arguments: Sequence[Any]) -> list[Status]:
        """The statuses of some arguments."""
        return [self.statuses.tapped(x)[1] if isinstance(x, Tensor) else None for x in arguments]

    def set_statuses(self, arguments: Sequence[Any], statuses: Sequence[Status]) -> None:
        """Gives some arguments the statuses of others."""
        for argument, status in zip(arguments, statuses, strict=True):
            if isinstance(argument, Tensor):
                self.statuses.let_be(argument, status)

    def _decide(self, *call: Any, **_: Any) -> Decision:
        """Decides as usual, but gives rows to a call whose rule reads values.

        AOTAutograd decides what checkpoints compute again.
        """
        try:
            with _WithoutValues():
                return decide(*call, is_bare=False, batch=self._batch)
        except _ValuesError:
            reads = call[-1]
            return UseRows([(x, status) for x, status in reads if isinstance(status, Tracked)])


class Runner(fx.Interpreter):
    """Runs the graph of a region under the recorder."""

    def __init__(self, module: fx.GraphModule, recorder: TraceRecorder, history: History) -> None:
        super().__init__(module)
        self._recorder, self._history = recorder, history

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; notes what it computes, and what it changes without samples."""
        given = [(x, _changes(x)) for x in tensors_in(self.fetch_args_kwargs_from_env(n))]
        result = super().run_node(n)
        for x, version in given:
            if _changes(x) != version and self._recorder.statuses.tapped(x)[1] is not BATCHED:
                self._history.note_change(x)
        self._history.note(n, result)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function, with the recorder inside of checkpoints."""
        if str(target) == "tag_activation_checkpoint":
            body, *inputs = args
            args = (_recorded_again(body, len(inputs), self._recorder), *inputs)
        return super().call_function(target, args, kwargs)


def _recorded_again(body: fx.GraphModule, inputs: int, recorder: TraceRecorder) -> fx.GraphModule:
    """A checkpoint's body, which is also recorded when autograd runs it a second time."""
    graph = fx.Graph()
    given = tuple(graph.placeholder(f"input_{i}") for i in range(inputs))
    graph.output(graph.call_module("body", given))
    module = fx.GraphModule({"body": _Reentered(body, recorder)}, graph)
    module.meta = body.meta
    return module


class _Reentered(nn.Module):
    """Runs the body of a checkpoint. The second run reuses the taps of the first."""

    def __init__(self, body: fx.GraphModule, recorder: TraceRecorder) -> None:
        super().__init__()
        self._run = fx.Interpreter(body).run
        self._recorder = recorder
        self._first: tuple[int, list[Status]] | None = None

    def forward(self, *inputs: Any) -> Any:
        """Runs the body, under the recorder."""
        recorder, tapping = self._recorder, self._recorder.tapping
        if self._first is None:
            self._first = len(tapping.uses), recorder.statuses_of(inputs)
            return self._run(*inputs)
        start, statuses = self._first
        before = tapping.uses[start:]
        del tapping.uses[start:]
        recorder.recording.count = start
        recorder.set_statuses(inputs, statuses)
        with recorder:
            output = self._run(*inputs)
        tapping.uses.extend(before[len(tapping.uses) - start :])
        recorder.recording.count = len(tapping.uses)
        return output


def _changes(tensor: Any) -> int:
    """How often a tensor was changed in place, including by operators below autograd.

    Batch normalisation changes its running statistics there.
    """
    version: int = tensor._version
    if isinstance(tensor, FunctionalTensor):
        version += torch._functionalize_mutation_counter(tensor.elem)
    return version


def record(
    module: fx.GraphModule, args: Sequence[Any], inputs: PartInputs
) -> tuple[Sequence[Any], TracedTapping]:
    """Runs a region on traced arguments, with taps; returns its outputs and the record."""
    parameters, derived, batched, samples = inputs
    recording = Recording(Channel(), {args[i]: str(i) for i in parameters})
    history = History(module, batched)
    tapping = TracedTapping(recording, history)
    recorder = TraceRecorder(tapping, OpenBatch.of(args, batched, samples))
    roots = [args[i] for i in derived]
    recorder.set_statuses(roots, [Tracked.of(x, (x,)) for x in roots])
    recorder.mark([args[i] for i in batched])
    versions = [(i, _changes(x)) for i, x in enumerate(args) if isinstance(x, Tensor)]
    with recorder:
        outputs = Runner(module, recorder, history).run(*args)
    changed = {i for i, version in versions if _changes(args[i]) != version}
    for tracked, known in tapping.derivations.items():
        if not changed.isdisjoint(known.inputs):  # also if it was changed after the use
            name = "a tensor that is changed in place"
            tapping.without_rule += [(name, p) for p in tracked.sources]
    derived_outputs: dict[int, dict[int, Tracked]] = {}  # by the base of which they are views
    for position, tensor in enumerate(outputs):
        status = recorder.statuses.tapped(tensor)[1] if isinstance(tensor, Tensor) else None
        if isinstance(status, Tracked) and recorder.statuses.parameter(tensor) is None:
            derived_outputs.setdefault(id(base_of(tensor)), {})[position] = status
    for statuses in derived_outputs.values():
        way = history.of(*[outputs[i] for i in statuses])
        if way is None:
            sources = [p for status in statuses.values() for p in status.sources]
            tapping.without_rule += [("an output of parameters alone", p) for p in sources]
        else:
            tapping.outputs[tuple(statuses)] = way
    return outputs, tapping
