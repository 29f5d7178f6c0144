"""Wrappers: hands gradients to DistributedDataParallel, which exchanges them as usual.

It exchanges them in the hooks of parameters, bucket by bucket, and divides the sum by the number of
ranks. A pass that reaches only parameters runs each of these hooks once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from autogram._capture.autograd.grad import dtype_of_grad
from autogram._capture.autograd.graph import leaves_behind
from autogram._capture.distribution import learns, mark_of, wrapper_now, wrappers_of
from autogram._capture.recording import Channel
from autogram._distributed.group import Group
from autogram._undo import undone
from autogram.errors import UnsupportedError, listed


class Wrappers:
    """The wrappers that run the forward passes of one step of a rank."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._seen: dict[Any, set[int]] = {}  # with the marks of its forward passes
        self._wrapped: dict[int, Any] = {}
        self._touched: dict[int, Tensor] = {}

    def _see(self, channel: Channel, losses: Tensor) -> None:
        """Notes the wrappers that ran the forward passes of some losses of the step."""
        for wrapper, marks in wrappers_of(channel, losses).items():
            members = dist.get_process_group_ranks(wrapper.process_group)
            if sorted(members) != self._group.members:
                raise UnsupportedError(
                    f"A `DistributedDataParallel` adds up the gradients of the ranks {members}, "
                    f"and the engine those of {self._group.members}. Pass its group to the engine: "
                    "`Engine(model, distributed=ddp.process_group)`."
                )
            self._seen.setdefault(wrapper, set()).update(marks)
            self._wrapped.update({id(p): wrapper for p in wrapper.parameters()})
        if not losses.numel() and losses.grad_fn is not None:
            # Without objectives, wrappers wait for zero gradients of all that the pass used.
            self._touched.update({id(leaf): leaf for leaf in leaves_behind(losses)})

    @contextmanager
    def passing(self, channel: Channel, losses: Iterable[Tensor]) -> Iterator[None]:
        """Notes the wrappers of some losses, and hides passes from those that still learn.

        A wrapper with a static graph takes the first pass for the one whose gradients it exchanges.

        Raises:
            UnsupportedError: A wrapper sums over other processes.
        """
        for part in losses:
            self._see(channel, part)
        unlearned = [wrapper for wrapper in self._seen if learns(wrapper)]

        def delay(*, is_on: bool) -> None:
            for wrapper in unlearned:
                wrapper._static_graph_delay_allreduce_enqueued = is_on

        with undone(partial(delay, is_on=False)):
            delay(is_on=True)
            yield

    @property
    def wrapped(self) -> int:
        """Number of parameters whose gradients are managed by wrappers."""
        return len(self._wrapped)

    def has(self, parameter: Tensor) -> bool:
        """Whether a wrapper manages the gradient of a parameter."""
        return id(parameter) in self._wrapped

    def waits_for(self, parameter: Tensor, *, is_reached: bool, is_reached_elsewhere: bool) -> bool:
        """Whether a wrapper waits for the gradient of a parameter on this rank.

        A wrapper that looked for unused parameters does not wait for them.
        """
        wrapper = self._wrapped.get(id(parameter))
        if wrapper is None:
            return False
        if is_reached or id(parameter) in self._touched:
            return True
        return is_reached_elsewhere and not wrapper.find_unused_parameters

    def hand_over(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Gives this rank's gradients to the wrappers, which leave the sum over ranks.

        Wrappers divide their sums by the number of ranks, sooner or later.
        """
        touched = [p for p in self._touched.values() if self.has(p) and p.requires_grad]
        gradients = {**{p: torch.zeros_like(p) for p in touched}, **gradients}
        gradients = {**self._rest_of_open(gradients), **gradients}
        tensors = list(gradients)
        scaled = [(gradients[p] * self._group.size).to(dtype_of_grad(p)) for p in tensors]
        if tensors:
            sinks = [_sink(wrapper) for wrapper in self._seen if learns(wrapper)]
            ones = [torch.ones_like(sink) for sink in sinks]
            torch.autograd.backward([*tensors, *sinks], [*scaled, *ones])

    def _is_open(self, wrapper: Any) -> bool:
        """Whether a wrapper's forward pass still runs, after which it will exchange gradients."""
        is_seen = wrapper is wrapper_now() and wrapper in self._seen
        return is_seen and bool(wrapper.require_backward_grad_sync)

    def _rest_of_open(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Prepares a wrapper whose forward pass still runs; returns zeros for its other parameters.

        Trainers may make whole steps within a forward pass. The wrapper would begin to wait for
        gradients only after it. Unless it looks for unused parameters, it waits for all of them.
        """
        wrapper = wrapper_now()
        if not self._is_open(wrapper):
            return {}
        expected = [p for p in wrapper.parameters() if p in gradients]
        if wrapper.find_unused_parameters:
            wrapper.reducer.prepare_for_backward([p.view_as(p) for p in expected])
            return {}
        wrapper.reducer.prepare_for_backward([])
        among = set(map(id, expected))
        others = [p for p in wrapper.parameters() if p.requires_grad and id(p) not in among]
        return {p: torch.zeros_like(p) for p in others}

    def check_waiting(self) -> None:
        """Refuses wrappers that no longer wait for gradients, and would not sum those of the ranks.

        Raises:
            UnsupportedError: An earlier backward pass used the same forward passes.
        """
        for wrapper, marks in self._seen.items():
            marks = marks - {0}
            is_taken = marks and mark_of(wrapper) not in marks and not self._is_open(wrapper)
            if is_taken and _has_ended(wrapper):
                raise UnsupportedError(
                    "Call the model again before each `engine.backward`; or call the module "
                    "inside, `ddp.module(x)`, whose gradients the engine adds up itself, any "
                    "number of times. A `DistributedDataParallel` exchanges gradients in one "
                    "backward pass after each of its forward passes, and that of the losses has "
                    "already had one: the gradients of another would not be exchanged."
                )

    def check_outside(self, outside: Sequence[Tensor]) -> None:
        """Refuses parameters outside of J if nobody would sum their gradients.

        Raises:
            UnsupportedError: There are some.
        """
        are_learning = any(map(learns, self._seen))  # a static graph, from the next pass
        names = [
            str(tuple(x.shape))
            for x in outside
            if isinstance(x, nn.Parameter) and (are_learning or not self.has(x))
        ]
        if names:
            raise UnsupportedError(
                f"The losses depend on parameters of the shapes {listed(names)} that are not the "
                "engine's: their gradients would not be added up over the ranks. Pass their "
                "modules to `Engine` as well; or make two passes: "
                "`losses.backward(engine.weights(losses, weighting))`."
            )


def _has_ended(wrapper: Any) -> bool:
    """Whether a wrapper that took gradients waits for no more."""
    try:
        wrapper.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _sink(wrapper: Any) -> Tensor:
    """The tensor that a static-graph wrapper adds to the graph of its first forward pass.

    Backpropagating through it makes the wrapper exchange gradients after the pass.
    """
    from torch.nn.parallel.distributed import _DDPSink

    one = torch.ones((), device=next(wrapper.parameters()).device, requires_grad=True)
    (sink,) = _DDPSink.apply(weakref.ref(wrapper), one)
    return sink  # type: ignore[no-any-return]  # a tensor, as it was given
