"""Backward passes of an engine, distinguished from inner passes and from other threads' passes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from autogram._capture.autograd.graph import explaining_freed_graphs, nodes_behind
from autogram._capture.autograd.nested import (
    is_watched,
    running_pass,
    unwatch,
    watch,
)
from autogram._capture.autograd.streams import Streams
from autogram._capture.from_graph.tensor_hooks import retaining
from autogram._capture.recording import Channel, Recording
from autogram._undo import undone
from autogram.errors import UnsupportedError, listed
from autogram.hooks.backward import SILENT_PASSES

_CPU = torch.device("cpu")
_Told = Callable[[Tensor], object]
Output = Tensor | GradientEdge | list[GradientEdge]


@contextmanager
def hooked(hooks: Iterable[tuple[Any, Callable[..., None]]]) -> Iterator[None]:
    """Calls functions at nodes in each pass of an engine within a block.

    Except in passes that taps stop. Each function gets the pass, and the cotangents of the node's
    inputs and results.
    """

    def call(function: Callable[..., None], *cotangents: tuple[Tensor | None, ...]) -> None:
        current = None if is_over else running_pass()
        if current is not None and not current.is_blocked:
            function(current, *cotangents)

    handles: list[Any] = []
    is_over: list[bool] = []  # disables hooks whose handles an interrupt has lost

    def remove() -> None:
        is_over.append(True)
        for handle in handles:
            handle.remove()

    with undone(remove):
        for node, function in hooks:
            handles.append(node.register_hook(partial(call, function)))
        yield


@dataclass(eq=False)
class Pass:
    """A backward pass of an engine.

    Other passes may run at the same time: inside this one, where a hook or a custom autograd
    Function differentiates something, and in other threads. Taps answer only to this pass.
    Gradients that inner passes add to `.grad` are dropped.
    """

    channel: Channel
    """The channel of the taps that answer."""
    receiver: Any = None
    """A `Receiver` of the uses' cotangents, or ``None``."""
    _: KW_ONLY
    hidden: int | None = None
    """The size of the leading dimension that a batched pass hides."""
    is_blocked: bool = False
    """Whether taps stop the pass, so that nothing beyond the nearest taps is differentiated."""
    is_step: bool = False
    """Whether the pass replaces the user's backward pass, in which inner passes would add to
    `.grad` of tensors that do not belong to the engine."""
    is_alone: bool = False
    """Whether the pass is made without a vote of the processes that make passes together."""
    _number: int | None = None
    _handle: RemovableHandle | None = None
    _error: BaseException | None = None
    _aside: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = field(default_factory=dict)
    """Original gradients, by the `id` of their tensors."""
    _has_nested: bool = False
    _kept: list[tuple[Any, Callable[[], tuple[Tensor, ...]], Tensor]] = field(default_factory=list)
    _reached: set[Recording] = field(default_factory=set)
    _retained: list[tuple[Recording | None, Tensor, Tensor | None]] = field(default_factory=list)
    """Activations that retain their gradient, with their original gradients."""
    _streams: Streams | None = None
    """The streams of a pass with a receiver, unless everything is on the CPU."""
    _waiting: deque[tuple[_Told, Tensor]] = field(default_factory=deque)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def differentiate(
        self,
        output: Output,
        inputs: Sequence[Tensor] | Sequence[GradientEdge],
        cotangent: Tensor | Sequence[Tensor],
        *,
        retain_graph: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """Runs the pass once. Returns ``None`` for inputs that the output does not depend on.

        The output may be several results of one node, with a cotangent for each. Without inputs,
        the pass reaches all leaves, and adds to their gradients.
        """
        results: list[tuple[Tensor | None, ...]] = []
        self.differentiate_each([(output, cotangent, retain_graph)], inputs, results.append)
        return results[0]

    def differentiate_each(
        self,
        outputs: Sequence[tuple[Output, Tensor | Sequence[Tensor], bool]],
        inputs: Sequence[Tensor] | Sequence[GradientEdge],
        take: Callable[[tuple[Tensor | None, ...]], object],
    ) -> None:
        """Runs the pass once for each output, with its cotangent, and whether to keep its graph.

        ``take`` receives each output's gradients before the next run.
        """
        if self.channel.before_pass is not None and not (self.is_alone or running_pass()):
            self.channel.before_pass()
        if self.receiver is not None:
            given = [x for _, x, _ in outputs]
            devices = {
                x.device for x in chain(*[[x] if isinstance(x, Tensor) else x for x in given])
            }
            for recording in self.channel.recordings:
                devices.update([parameter.device for parameter in recording.names])
            if devices != {_CPU}:
                self._streams = Streams(devices)
        kept = [(r, reference()) for r in self.channel.recordings for reference in r.retained]
        self._retained = [(recording, x, x.grad) for recording, x in kept if x is not None]
        if tensors := retaining():
            starts = [x[0] if isinstance(x, list) else x for x, _, _ in outputs]
            nodes = {*chain(*map(nodes_behind, starts))}
            self._retained += [(None, x, x.grad) for x in tensors if x.grad_fn in nodes]
        with undone(self._undo):
            for output, cotangent, must_retain in outputs:
                if isinstance(output, Tensor):
                    with torch.enable_grad():
                        output = output.view_as(output)  # its node is in no other pass
                start = output[0] if isinstance(output, list) else output
                node = start.grad_fn if isinstance(start, Tensor) else start.node
                assert node is not None
                if self._handle is not None:
                    self._end()
                watch(self)
                self._handle = node.register_prehook(self._begin)
                with explaining_freed_graphs(start):
                    if inputs:
                        gradients = torch.autograd.grad(
                            output, inputs, cotangent, retain_graph=must_retain, allow_unused=True
                        )
                    else:
                        torch.autograd.backward(output, cotangent, retain_graph=must_retain)
                        gradients = ()
                take(gradients)
            self._finish()
        if self._kept and self.hidden is None:  # otherwise they are shown after the batched pass
            self.show_kept()

    def _end(self) -> None:
        """Forgets the pass of one output."""
        if self._handle is not None:
            self._handle.remove()
        if self._number is not None:
            SILENT_PASSES.pop(self._number, None)
            self._number = None

    def _undo(self) -> None:
        """Restores everything to the state before the pass."""
        self._end()
        unwatch(self)
        self._error = None  # its traceback leads back to here
        self._put_back()
        for recording, tensor, gradient in self._retained:
            if recording is None or recording in self._reached:
                tensor.grad = gradient

    def reach(self, recording: Recording) -> bool:
        """Notes that a tap of a recording is reached; returns whether its cotangent is wanted."""
        self._reached.add(recording)
        return self.receiver is not None and self._error is None

    def show(self, call: _Told, cotangent: Tensor, others: Sequence[Tensor] = ()) -> None:
        """Makes a call with a cotangent ``(k, *shape)``, even if a batched pass hides ``k``.

        An error of the call is raised after the pass: if it went through autograd, callbacks that
        others have queued for the end of the pass would not run. The pass goes on to its end, but
        shows nothing more. The call may read ``others``, which must be waited for, too.
        """
        if self.hidden is None:
            self.tell(call, cotangent.unsqueeze(0), others)
        else:
            tell = partial(self.tell, call, others=others)
            _Unbatch.apply(cotangent, tell, self.hidden)  # type: ignore[no-untyped-call]  # as typed in torch

    def tell(self, call: _Told, shown: Tensor, others: Sequence[Tensor] = ()) -> None:
        """Makes a call with a tensor, and keeps an error like :meth:`show`.

        Autograd has a thread for each device. If another thread is making a call, that thread makes
        this call as well: waiting could block a thread that the other call needs.
        """
        try:
            if self._streams is not None:
                is_there = self._streams.take((shown, *others))
                self._waiting.append((call, shown))
                self._call_in_turn(None if is_there else self._streams)
            elif self._error is None:
                call(shown)
        except BaseException as error:
            self._error = error

    def _call_in_turn(self, streams: Streams | None) -> None:
        """Makes all waiting calls, unless another thread is making some, or one has failed."""
        while self._waiting and self._turn.acquire(blocking=False):
            try:
                with nullcontext() if streams is None else streams.enter():
                    while self._waiting:
                        call, shown = self._waiting.popleft()
                        if self._error is None:
                            call(shown)
            finally:
                self._turn.release()

    def fail(self, error: BaseException) -> None:
        """Keeps an error to raise after the pass, unless there is one already."""
        if self._error is None:
            self._error = error

    def keep(self, *shown: Any) -> None:
        """Keeps a use, a function that reads its saved tensors, and its cotangent for later."""
        self._kept.append(shown)

    def show_kept(self) -> None:
        """Shows kept cotangents to the receiver, outside of the pass; raises its error."""
        kept, self._kept = self._kept, []
        for use, saved, cotangent in kept:
            self.receiver(use, saved(), cotangent)

    def raise_error(self) -> None:
        """Raises the error of a call that was made after the pass, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def note_nested(self, changing: Sequence[Tensor]) -> None:
        """Sets aside the gradients to which a pass that begins inside this one may add."""
        if not self._has_nested:  # code that starts a pass may itself add its results
            self._has_nested = True
            changing = [*self.channel.parameters(), *changing]
        for tensor in changing:
            known = self._aside.get(id(tensor))
            if known is None or known[0]() is not tensor:
                self._aside[id(tensor)] = weakref.ref(tensor), tensor.grad
                if tensor.grad is not None:
                    tensor.grad = None

    def _put_back(self) -> list[Tensor]:
        """Restores gradients, and returns living tensors that got another one in the meantime."""
        changed = []
        for key, (reference, gradient) in [*self._aside.items()]:
            tensor = reference()
            if tensor is not None and tensor.grad is not gradient:
                changed += [tensor] if tensor.grad is not None else []
                tensor.grad = gradient
            del self._aside[key]  # only now does something else hold the gradient
        return changed

    def _begin(self, _: object) -> None:
        """Learns the number of the pass at its first node, and lists it as running."""
        if self._number is None and is_watched(self):
            self._number = torch._C._current_graph_task_id()
            SILENT_PASSES[self._number] = self

    def _finish(self) -> None:
        """Raises an error found during the pass."""
        changed = self._put_back()
        names = self.channel.parameters(changed) if changed else {}
        hidden = [f"`{names[tensor]}`" for tensor in changed if tensor in names]
        if hidden:
            raise UnsupportedError(
                "A backward pass inside the engine's pass adds to the gradients of "
                f"{listed(hidden)}. A custom autograd Function or a hook starts it, as reversible "
                "layers and checkpoints with `use_reentrant=True` do: the graph of the losses does "
                "not lead to these parameters. Let the Function take them as inputs "
                "and return their gradients, use ordinary layers or `use_reentrant=False`, or pass "
                "modules without these parameters to the engine."
            )
        if changed and self.is_step:
            raise UnsupportedError(
                "A backward pass inside the engine's pass adds to the gradients of tensors that "
                "are not the engine's, of the shapes "
                f"{listed([str(tuple(x.shape)) for x in changed])}."
                " A custom autograd Function or a hook starts it. `backward` cannot weight these "
                "gradients. Call `compute_gramian`, and then `losses.backward(weights)`."
            )
        if self._error is not None:
            raise self._error


class _Unbatch(torch.autograd.Function):
    """Passes on a cotangent with the leading dimension that a batched pass hides."""

    @staticmethod
    def forward(cotangent: Tensor, receive: Callable[[Tensor], None], hidden: int) -> Tensor:
        receive(cotangent.expand(hidden, *cotangent.shape))  # equal for all objectives
        return cotangent.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int, None, None],
        cotangent: Tensor,
        receive: Callable[[Tensor], None],
        hidden: int,
    ) -> tuple[Tensor, None]:
        del info, hidden
        receive(cotangent.movedim(in_dims[0], 0))
        return cotangent.new_zeros(()), None
