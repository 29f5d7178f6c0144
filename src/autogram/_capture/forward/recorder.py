"""The recorder: sees every torch call of a forward pass, and taps the uses of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autogram._capture.autograd.graph import nodes_behind
from autogram._capture.forward.answers import Operands, ask
from autogram._capture.forward.calls import Call, inlined, kind_of
from autogram._capture.forward.checkpoints import Checkpoints
from autogram._capture.forward.containers import exchange, tensors_in
from autogram._capture.forward.marks import BATCHED, Marks, Status, Unknown
from autogram._capture.forward.tapper import Tapper
from autogram._capture.recording import Channel, Recording, entry_of
from autogram._capture.tap import is_in_place_tap, is_tap_of
from autogram._capture.tracked import Tracked, settle, track_derived, track_unseen
from autogram._errors import UnsupportedError
from autogram.rules import find_rule


class Recorder(TorchFunctionMode):
    """One recorded forward pass, from the opening of its outermost module to its end.

    A call that reads batched tensors alone, or constants, is only noted. One that reads tracked
    tensors and constants derives a tensor; one in which tracked tensors meet batched ones is a
    use.
    """

    def __init__(self, channel: Channel, parameters: dict[Tensor, str]) -> None:
        super().__init__()
        _refuse_complex(parameters)
        self._recording = Recording(channel, parameters)
        self._marks = Marks(parameters)
        self._tapper = Tapper(self._recording)
        self.checkpoints = Checkpoints()
        channel.recordings.add(self._recording)

    def note_exchange(self) -> None:
        """Notes that gradients of this forward are exchanged between processes."""
        self._recording.is_exchanged = True

    def begin(self, inputs: Any, module: nn.Module | None = None) -> None:
        """Marks what the outermost module is given."""
        tensors = self._given(inputs)
        sizes = [t.shape[0] for t in tensors if t.dim() > 0 and not t.is_nested]
        size = next((n for n in sizes if n != 1), 1)
        self._recording.sizes = frozenset(n for t in tensors for n in _sizes(t))
        for place, tensor in enumerate(tensors):
            # Masks and position indices without a batch dimension are constants. What is taken
            # for one wrongly costs time, not exactness: it ends in a derived tensor.
            if tensor.is_nested or size in tensor.shape[:2] or not tensor.is_leaf:
                sources, _ = self._untapped_parameters(tensor)
                if sources and self._recording.channel.was_derived(
                    entry_of(module, tensors), place
                ):
                    continue  # adopted when it is read, as it was the first time
                if sources:  # used before this module was entered
                    self._tapper.tap_unseen(tensor, tuple(sources), tuple(sources.values()))
                self._marks.set(tensor, BATCHED)

    def enter(self, inputs: Any, module: nn.Module) -> None:
        """Enters another module. A checkpoint that runs it again will give it such inputs again."""
        if self.checkpoints.enter():
            tensors = self._given(inputs)
            statuses = [None if t.is_leaf else self._marks.get(t) for t in tensors]
            derived = [place for place, x in enumerate(statuses) if isinstance(x, Tracked)]
            self._recording.enter(entry_of(module, tensors), frozenset(derived))

    def _given(self, inputs: Any) -> list[Tensor]:
        """The tensors in a module's inputs that are none of its parameters."""
        return [t for t in tensors_in(inputs) if self._marks.parameter(t) is None]

    def end(self, output: Any) -> Any:
        """The output of the outermost module, with taps where it is computed from parameters."""
        tapped: dict[int, Tensor] = {}
        for tensor in tensors_in(output):
            status = self._status(tensor) if tensor.requires_grad else None
            if isinstance(status, Tracked):
                tapped[id(tensor)] = self._tapper.tap_result(tensor, settle(tensor, status))
        self._marks.clear()
        return exchange(output, tapped) if tapped else output

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carries out one torch call, and records it."""
        del types
        if torch.compiler.is_dynamo_compiling():
            return function(
                *args, **(kwargs or {})
            )  # what is compiled is adopted like what is unseen
        kind = kind_of(function)
        # Inside `torch.func` transforms, tensors are wrappers that taps must not keep. What comes
        # out of the transform is adopted, like the output of any call not seen.
        if kind.is_question or torch._C._are_functorch_transforms_active():
            return function(*args, **(kwargs or {}))
        return self._record(Call(function, kind, args, kwargs or {}))

    def _record(self, call: Call) -> Any:
        """Carries out a call by what it reads."""
        tracked: Operands = []
        reads_batched = False
        reads = call.reads
        for tensor in reads:
            status = self._marks.get(tensor)
            if isinstance(status, Unknown):
                status = self._learn(tensor)
            if status is BATCHED:
                reads_batched = True
            elif isinstance(status, Tracked):
                tracked.append((tensor, status))
        if not tracked or not torch.is_grad_enabled():
            output = call.run()
            if not reads_batched:
                self._mark_constant(call, output)
        elif reads_batched:
            output = self._use(call, reads, [(x, settle(x, status)) for x, status in tracked])
        else:
            output = call.run()
            self._mark_derived(call, output, [status for _, status in tracked])
        if reads_batched:
            self._mark_batched(call, output)
        return output

    def _use(self, call: Call, reads: list[Tensor], operands: Operands) -> Any:
        """Carries out a call in which tracked tensors meet batched ones."""
        is_complex = False
        for tensor in reads:
            if tensor.is_nested:
                raise _nested(call)
            is_complex |= tensor.is_complex()
        rule = None if self.checkpoints.is_bare else find_rule(call.function)
        # Rules are written for real numbers; vector-Jacobian products know how to conjugate.
        if rule and not is_complex:
            answer = ask(rule, call, operands)
            if answer is not None:
                return self._tapper.run_with_rule(call, operands, answer, rule)
        body = None if rule else inlined(call.function)
        if body is not None:
            with self:
                output = body(*call.args, **call.kwargs)
            for tensor in call.results(output):
                self._status(tensor)  # adopts what the body has done unseen
            return output
        return self._tapper.run_without_rule(call, operands)

    def _status(self, tensor: Tensor) -> Status:
        """What is known of a tensor, or can be known from its graph."""
        known = self._marks.get(tensor)
        return self._learn(tensor) if isinstance(known, Unknown) else known

    def _learn(self, tensor: Tensor) -> Status:
        """What the graph of a tensor tells, which is then known."""
        status = self._adopt(tensor)
        self._marks.set(tensor, status)
        return status

    def _adopt(self, tensor: Tensor) -> Status:
        """The status of a tensor that comes from a call which the recorder could not see.

        That is a custom autograd Function, a scripted module, or a call before the recording. If
        parameters entered it there, the tensor is derived from them; if batched tensors did too,
        it is a use, and is tapped when it is first read.
        """
        sources, reaches_tap = self._untapped_parameters(tensor)
        if not sources:
            return BATCHED
        if not reaches_tap:
            return track_unseen(tensor, tuple(sources))
        self._tapper.tap_unseen(tensor, tuple(sources), tuple(sources.values()))
        return BATCHED

    def _untapped_parameters(self, tensor: Tensor) -> tuple[dict[Tensor, Tracked], bool]:
        """The parameters that reach a tensor past every tap, and whether a tap does."""
        sources: dict[Tensor, Tracked] = {}
        reaches_tap = False
        for node in nodes_behind(tensor, self._ends_a_search):
            if node.name() == "CheckpointFunctionBackward":
                raise UnsupportedError(
                    "A part of the model is checkpointed with `use_reentrant=True`, which hides "
                    "its calls from the engine. Pass `use_reentrant=False` to `checkpoint` (to "
                    "models of transformers, in `gradient_checkpointing_kwargs`)."
                )
            reaches_tap |= is_tap_of(self._recording.channel, node)
            variable: Tensor | None = getattr(node, "variable", None)
            if variable is not None and (tracked := self._marks.parameter(variable)):
                sources[variable] = tracked
        return sources, reaches_tap

    def _ends_a_search(self, node: Any) -> bool:
        """Whether a node covers all that is behind it: an in-place tap may cover a slice alone."""
        return is_tap_of(self._recording.channel, node) and not is_in_place_tap(node)

    def _mark_batched(self, call: Call, output: Any) -> None:
        """Marks the output of a call that reads a batched tensor."""
        for tensor in call.results(output):
            # One integer, such as the number of an expert, is not one for each sample.
            is_number = not tensor.is_floating_point() and tensor.numel() == 1
            self._marks.set(tensor, None if is_number else BATCHED)
        if call.kind.shows_cotangent:
            self._recording.note(call)

    def _mark_constant(self, call: Call, output: Any) -> None:
        """Marks the output of a call that reads constants, where its graph looks otherwise.

        Some constants require a gradient that is none of ours, such as a frozen weight that is
        wrapped as a parameter meanwhile.
        """
        for tensor in call.results(output):
            if tensor.requires_grad and not tensor.is_leaf:
                sources, reaches_tap = self._untapped_parameters(tensor)
                if not sources and not reaches_tap:
                    self._marks.set(tensor, None)

    def _mark_derived(self, call: Call, output: Any, origins: list[Tracked]) -> None:
        """Marks the output of a call that reads tracked tensors and constants."""
        for tensor in call.results(output):
            if not tensor.requires_grad or tensor.is_leaf:
                continue
            base = None if tensor._base is None else self._status(tensor._base)
            known = base if isinstance(base, Tracked) else None
            self._marks.set(tensor, track_derived(tensor, origins, known, call.kind.is_cast))


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """The sizes of the dimensions of an input in which the samples may lie."""
    if tensor.is_nested:
        return ()
    has_features_alone = tensor.dim() == 2 and tensor.is_floating_point()
    return tuple(tensor.shape[: 1 if has_features_alone else 2])


def _refuse_complex(parameters: Mapping[Tensor, str]) -> None:
    """Refuses trainable parameters that are complex."""
    if not any(dtype.is_complex for dtype in {parameter.dtype for parameter in parameters}):
        return
    for parameter, name in parameters.items():
        if parameter.requires_grad and parameter.is_complex():
            raise UnsupportedError(
                f"The parameter `{name}` is complex, and the inner product of complex gradients "
                "is not settled. Keep it as a real parameter with a last dimension of size two, "
                "and use `torch.view_as_complex` of it in the forward."
            )


def _nested(call: Call) -> UnsupportedError:
    """The error for tensors without a shape of numbers, which show no places of samples."""
    return UnsupportedError(
        f"`{call.kind.name}` was called with a nested tensor and a parameter. Pad the samples "
        "to one length, and mask what was added; or put them one behind the other in one "
        "tensor."
    )
