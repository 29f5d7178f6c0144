"""Passes: backward passes of an engine, told apart from all others that run meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autogram._capture.autograd.graph import explaining_freed_graphs
from autogram._capture.autograd.nested import Aside, watching
from autogram._capture.recording import Channel, Receiver, Recording
from autogram._errors import UnsupportedError, listed

# By the number that PyTorch gives to each pass.
_RUNNING: dict[int, Pass] = {}


def running_pass() -> Pass | None:
    """The pass of an engine that the autograd node which runs now belongs to, if it is one."""
    return _RUNNING.get(torch._C._current_graph_task_id()) if _RUNNING else None


class Pass:
    """A backward pass of an engine.

    Others may run at the same time: inside of it, where a hook or a custom autograd Function
    differentiates something, and in other threads. Taps answer to this one alone. What passes
    inside of it add to `.grad` of a tensor is dropped, as this one is none of the user's.

    Args:
        channel: The channel of the taps that answer.
        receive: Who is shown the cotangents of uses, if anybody is.
        hidden: The size of the leading dimension that a batched pass hides, or ``None``.
        is_blocked: Whether taps stop the pass, so that what lies between a tensor and the nearest
            taps is differentiated alone.
        is_step: Whether it stands for the user's backward pass, in which passes inside of it would
            add to `.grad` of tensors that are not the engine's.
    """

    def __init__(
        self,
        channel: Channel,
        receive: Receiver | None = None,
        *,
        hidden: int | None = None,
        is_blocked: bool = False,
        is_step: bool = False,
    ) -> None:
        self.channel = channel
        self.hidden = hidden
        self.is_blocked = is_blocked
        self._receive = receive
        self._is_step = is_step
        self._number: int | None = None
        self._error: Exception | None = None
        self._aside = Aside()
        self._has_nested = False
        self._reached: set[Recording] = set()

    def differentiate(
        self,
        output: Tensor | GradientEdge,
        inputs: Sequence[Tensor] | Sequence[GradientEdge],
        cotangent: Tensor,
        *,
        retain_graph: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """Runs the pass, once.

        Returns:
            The gradient of each input, or ``None`` where the output does not depend on it.

        Raises:
            FreedGraphError: An earlier pass has freed the graph.
            UnsupportedError: A pass inside of it adds to the gradients of parameters.
        """
        if isinstance(output, Tensor):
            with torch.enable_grad():
                output = output.view_as(output)  # with a new node, where no other pass comes along
        node = output.grad_fn if isinstance(output, Tensor) else output.node
        assert node is not None
        handle = node.register_prehook(self._begin)
        retained = self._retained()
        try:
            with watching(running_pass), explaining_freed_graphs():
                found: tuple[Tensor | None, ...] = torch.autograd.grad(
                    output, inputs, cotangent, retain_graph=retain_graph, allow_unused=True
                )
            self._finish()
        finally:
            handle.remove()
            if self._number is not None:
                del _RUNNING[self._number]
            self._error = None  # its traceback leads back to here
            self._aside.put_back()
            for recording, tensor, gradient in retained:
                if recording in self._reached:
                    tensor.grad = gradient
        return found

    def reach(self, recording: Recording) -> bool:
        """Notes that a tap of a recording is reached, and says whether its cotangent is wanted."""
        self._reached.add(recording)
        return self._receive is not None and self._error is None

    def show(self, use: Any, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        """Shows a cotangent ``(k, *output)``.

        An error of the receiver is raised behind the pass: if it went through autograd, callbacks
        that others have queued for the end of the pass would not run. The pass goes on to its end,
        and the receiver is shown nothing more.
        """
        assert self._receive is not None
        try:
            self._receive(use, saved, cotangent)
        except Exception as error:
            self._error = error

    def note_nested(self, changing: Sequence[Tensor]) -> None:
        """Puts aside the gradients that a pass which begins inside of this one may add to."""
        if not self._has_nested:  # or the code around it may, with what the pass returns
            self._has_nested = True
            changing = [*self.channel.parameters(), *changing]
        for tensor in changing:
            self._aside.take(tensor)

    def _begin(self, cotangents: tuple[Tensor, ...]) -> None:
        """Learns the number of the pass at its first node, and lists it as running."""
        del cotangents
        if self._number is None:
            self._number = torch._C._current_graph_task_id()
            _RUNNING[self._number] = self

    def _finish(self) -> None:
        """Raises what was found out on the way."""
        changed = self._aside.put_back()
        if changed:
            names = self.channel.parameters(changed)
            hidden = [f"`{names[tensor]}`" for tensor in changed if tensor in names]
            if hidden:
                raise _hidden(hidden)
            if self._is_step:
                raise _left_out(changed)
        if self._error is not None:
            raise self._error

    def _retained(self) -> list[tuple[Recording, Tensor, Tensor | None]]:
        """The activations whose gradients the user has asked to keep, and these gradients."""
        found = [(r, reference()) for r in self.channel.recordings for reference in r.retained]
        return [(recording, x, x.grad) for recording, x in found if x is not None]


def _hidden(names: Sequence[str]) -> UnsupportedError:
    """The error for parameters that the graph of the losses does not lead to."""
    return UnsupportedError(
        f"A backward pass inside of the engine's adds to the gradients of {listed(names)}. A "
        "custom autograd Function or a hook starts it (`torch.autograd.backward`), as reversible "
        "layers and checkpoints with `use_reentrant=True` do. The graph of the losses does not "
        "lead to these parameters, so that their part of J is not to be seen. Let the Function "
        "take them as inputs and return their gradients, use ordinary layers or "
        "`use_reentrant=False`, or give the engine modules without these parameters."
    )


def _left_out(changed: Sequence[Tensor]) -> UnsupportedError:
    """The error for a step that would not do what the user's backward pass does."""
    shapes = [str(tuple(tensor.shape)) for tensor in changed]
    return UnsupportedError(
        "A backward pass inside of the engine's adds to the gradients of tensors that are not the "
        f"engine's, of the shapes {listed(shapes)}. A custom autograd Function or a hook "
        "starts it. `backward` does not know for which weights. Call `compute_gramian`, and then "
        "`losses.backward(weights)`."
    )
