"""The recorder: sees every torch call of a forward pass, and taps the uses of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active as are_transforms_active
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from autogram._capture.forward.calls import Kind, first_of, kind_of, results_of, run_and_note
from autogram._capture.forward.checkpoints import (
    Checkpoints,
    ModuleCall,
    are_of_checkpoint,
    hooks_now,
)
from autogram._capture.forward.decision import (
    NO_BATCH,
    Batch,
    NoUse,
    RunBody,
    UseExpanded,
    UseRows,
    UseRule,
    decide,
)
from autogram._capture.forward.statuses import Statuses
from autogram._capture.forward.tapping import Tapping
from autogram._capture.tracked import (
    BATCHED,
    UNTAPPED,
    Batched,
    Tracked,
    note_hook,
    track_derived,
)
from autogram._containers import replaced, tensors_in


class Recorder(TorchFunctionMode):
    """Records one forward pass, from the beginning of its outermost module to the end.

    For each call, the recorder asks what is to be done, does that, and notes the statuses of the
    results. What remains of the pass is its ``recording``.
    """

    def __init__(self, tapping: Tapping, checkpoints: Checkpoints | None = None) -> None:
        super().__init__()
        self._checkpoints = Checkpoints() if checkpoints is None else checkpoints
        self.recording = tapping.recording
        self.tapping = tapping
        self.statuses = Statuses(tapping)
        self._hooks_at_entry = [hooks_now(True)]  # of each module that is open

    def begin(self, inputs: Any, module: nn.Module | None = None) -> None:
        """Marks the inputs of the outermost module."""
        recording, tensors = self.recording, list(tensors_in(inputs))
        are_parameters = [self.statuses.parameter(x) is not None for x in tensors]
        sizes = [_sizes(x) for x, is_so in zip(tensors, are_parameters, strict=True) if not is_so]
        recording.counted = recording.channel.counting.count(id(module), sizes)
        size, unspread = recording.counted.samples, recording.channel.unspread
        names = recording.names.items() if unspread else ()
        self.statuses.batch = Batch(size, {p for p, name in names if name in unspread})
        call = _call(module, tensors)
        before = self._checkpoints.recall(call) or [None] * len(tensors)
        are_batched = []
        for tensor, is_parameter, was_batched in zip(tensors, are_parameters, before, strict=True):
            # Masks and position indices without a batch dimension are constants. An input that is
            # wrongly taken for a constant costs time, and results stay exact.
            is_batched = False if is_parameter else was_batched
            if is_batched is None:
                is_batched = tensor.is_nested or not tensor.is_leaf or size in _sizes(tensor)
                if not is_batched and recording.channel.guesses_inputs:
                    is_batched = _may_have_parts(size, tensor)
                    recording.is_guess = recording.is_guess or is_batched
            are_batched.append(is_batched)
            if is_parameter or not (is_batched or tensor.requires_grad):
                continue
            sources, _ = self.statuses.untapped_parameters(tensor)
            if is_batched:
                self.statuses.adopt_batched(tensor, sources)
            elif not sources:  # else derived: adopted when a call reads it, as in the first run
                self.statuses.set(tensor, None)
        self._checkpoints.note(call, are_batched)

    def mark(self, tensors: Iterable[Tensor], status: Batched = BATCHED) -> None:
        """Marks tensors as batched, with or without taps."""
        for tensor in tensors:
            self.statuses.set(tensor, status)

    def enter(self, inputs: Any, module: nn.Module) -> None:
        """Enters another module, and notes inputs that a checkpoint will give to it again."""
        hooks = hooks_now(True)
        is_in_checkpoint = hooks is not None and self._are_of_checkpoint(hooks)
        self._hooks_at_entry.append(hooks)  # first, as the module is left also if this raises
        if is_in_checkpoint:
            tensors = list(tensors_in(inputs))
            are_batched = [self.statuses.is_batched(tensor) for tensor in tensors]
            self._checkpoints.note(_call(module, tensors), are_batched)

    def note_parameters(self, whole: Mapping[str, Tensor]) -> None:
        """Notes tensors that are parameters of these names from now on, in the place of shards."""
        names = self.recording.names
        self.recording.names = {whole.get(name, p): name for p, name in names.items()}
        for parameter in whole.values():
            self.statuses.add_parameter(parameter)

    def leave(self) -> bool:
        """Leaves the innermost module. Returns whether it was inside of another one."""
        if len(self._hooks_at_entry) == 1:
            return False
        self._hooks_at_entry.pop()
        return True

    def end(self, output: Any) -> None:
        """Adopts what the outermost module returns, and no call has read yet.

        What is computed from parameters alone has no place for samples in front of the calls by
        which the losses read it, and the graph shows these. As no tap keeps the recording, it is
        noted there, and also at results that the modules keep if there is no tap at all.
        """
        found = [(tensor, self.statuses.of(tensor)) for tensor in tensors_in(output)]
        if not self.recording.count:
            found += self.statuses.alive()
        for tensor, status in found:
            if status is UNTAPPED or isinstance(status, Tracked):
                self.recording.note_at(tensor)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carries out one torch call, and records it."""
        del types
        kwargs = kwargs or {}
        if is_dynamo_compiling():
            # Results of compiled calls are adopted like those of unseen calls. `Tensor.unflatten`
            # is a method in Python, which Dynamo cannot trace from inside of a mode.
            if function is Tensor.unflatten:
                return torch.unflatten(*args, **kwargs)
            return function(*args, **kwargs)
        kind = kind_of(function)
        # Inside `torch.func` transforms, tensors are wrappers that taps must not keep. Results of a
        # transform are adopted, too.
        if kind.is_question or are_transforms_active():
            return function(*args, **kwargs)
        statuses = self.statuses
        arguments = (*args, *kwargs.values()) if kwargs else args
        reads = statuses.read(arguments[:1] if kind.reads_first_only else arguments)
        has_untapped = statuses.has_untapped
        if has_untapped:
            changed = first_of(args, kwargs) if kind.is_in_place else None
            if stand_ins := statuses.tap_reads(reads, changed):
                args, kwargs = replaced((args, kwargs), stand_ins)
        hooks = hooks_now(True)
        is_bare = hooks is not None and self._are_of_checkpoint(hooks)
        # The second run of a checkpoint's part knows other inputs, and must save the same tensors.
        batch = statuses.batch if hooks is None else NO_BATCH
        decision = self._decide(kind, args, kwargs, reads, is_bare=is_bare, batch=batch)
        if isinstance(decision, NoUse) and not kind.changes_slices:
            output = function(*args, **kwargs)
        elif isinstance(decision, NoUse):
            output = run_and_note(kind, args, kwargs)
        elif isinstance(decision, UseRule):
            output = self.tapping.run_with_rule(kind, args, kwargs, decision)
        elif isinstance(decision, UseExpanded):
            output = self.tapping.run_expanded(kind, args, kwargs, decision)
        elif isinstance(decision, UseRows):
            output = self.tapping.run_without_rule(kind, args, kwargs, decision.reads)
        else:
            with self:
                output = decision.body(*args, **kwargs)
        if kind.shows_cotangent:
            self.recording.is_batchable = False  # or the user would see the hidden dimension
            if kind.name == "retain_grad":
                self.recording.retained.append(weakref.ref(first_of(args, kwargs)))
            for tensor, seen in reads:
                if isinstance(seen, Tracked):
                    note_hook(tensor, seen)
        results = results_of(kind, args, kwargs, output)
        if kind.reads_others:
            self.mark([x for x in results if not x.is_leaf], UNTAPPED)
            results = [x for x in results if x.is_leaf]
        if isinstance(decision, RunBody):
            statuses.read(results)  # adopts results of calls that were not seen in the body
        if isinstance(decision, NoUse) and not decision.is_batched:
            may_read = hooks is None  # what the call saved, which a checkpoint lets happen once
            self._mark_unbatched(results, decision.origins, kind, may_read=may_read)
            return output
        is_untapped = has_untapped and UNTAPPED in [status for _, status in reads]
        status = UNTAPPED if is_untapped else BATCHED
        for tensor in results:
            # A single integer, such as the number of an expert, does not belong to samples.
            # A size that depends on values, as of `nonzero` in a compiled part, is no ``int``.
            count: Any = 0 if tensor.is_floating_point() else tensor.numel()
            is_number = count.__class__ is int and count == 1
            statuses.set(tensor, None if is_number else status)
        return output

    _decide = staticmethod(decide)  # in the tracing of a compiled part, rules are asked otherwise

    def _mark_unbatched(
        self, results: Iterable[Tensor], origins: Sequence[Tracked], kind: Kind, *, may_read: bool
    ) -> None:
        """Marks results of tracked tensors and constants, or only constants.

        Some constants require a gradient, but not by the engine's parameters.
        """
        for tensor in results:
            if not tensor.requires_grad or tensor.is_leaf:
                continue
            if origins:
                base = None if tensor._base is None else self.statuses.of(tensor._base)
                derived = track_derived(tensor, origins, base, is_cast=kind.is_cast)
                derived.is_recorded = derived.is_recorded and may_read
                self.statuses.set(tensor, derived)
            elif self.statuses.untapped_parameters(tensor) == ({}, False):
                self.statuses.set(tensor, None)

    def _are_of_checkpoint(self, hooks: Any) -> bool:
        """Whether a checkpoint has set these hooks, since the innermost module was entered.

        Its part must save as many tensors when it runs again. A hooked module that the part enters
        opens a recording then, and the same taps save the same tensors. If the part enters none,
        its second run is not recorded, so that taps in the first run must save nothing.
        """
        return hooks != self._hooks_at_entry[-1] and are_of_checkpoint(hooks)


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """The sizes of the dimensions of an input in which the samples may be.

    In a row of integers, these are likely to be positions, as many as there are samples.
    """
    if tensor.is_nested:
        return ()
    is_first_alone = tensor.dim() == 2 and (tensor.is_floating_point() or len(tensor) == 1)
    return tuple(tensor.shape[: 1 if is_first_alone else 2])


def _may_have_parts(samples: int, tensor: Tensor) -> bool:
    """Whether an input may have another number of parts for each of so many samples.

    As images have, of which a text shows several, or which are looked at with several texts, or
    as patches have that are folded with the samples.
    """
    if tensor.dim() < 2 or len(tensor) < 2:
        return False
    small, large = sorted((samples, len(tensor)))
    return tensor.is_floating_point() or (small > 0 and large % small == 0)


def _call(module: nn.Module | None, inputs: Sequence[Tensor]) -> ModuleCall:
    """Identifies a call of a module with some tensors, when a checkpoint makes it again."""
    return id(module), tuple(() if x.is_nested else tuple(x.shape) for x in inputs)
