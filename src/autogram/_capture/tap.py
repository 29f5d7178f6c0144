"""Taps: identity nodes that show a use's cotangent to the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autogram._capture.autograd.graph import use_of
from autogram._capture.autograd.passes import running_pass
from autogram._capture.recording import Channel
from autogram._capture.uses import Use


def tap(use: Use, output: Tensor, saved: Sequence[Tensor], *, in_place: bool) -> Tensor:
    """The output of a use with a tap on it (the same tensor, after an in-place call)."""
    anchor = use.recording.channel.anchor
    if not in_place:
        tapped: Tensor = _apply(_Tap, output, use, anchor, saved)
        return tapped
    # The values stay as they are, so what the call saved of its own result is still valid.
    with torch.autograd._unsafe_preserve_version_counter(output):  # type: ignore[attr-defined]  # as exported
        _apply(_InPlaceTap, output, use, anchor, saved)
    return output


def is_tap_of(channel: Channel, node: Any) -> bool:
    """Whether a node of the autograd graph is a tap of this engine."""
    use = use_of(node)
    return use is not None and use.recording.channel is channel


def is_in_place_tap(node: Any) -> bool:
    """Whether a tap is on a tensor that was changed in place, or on a slice of it."""
    return isinstance(node, _InPlaceTap._backward_cls)


class _Tap(torch.autograd.Function):
    """Identity. Tensors are kept by autograd, to be freed and off-loaded with the graph."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, use: Use, anchor: Tensor, saved: Sequence[Tensor]
    ) -> Tensor:
        del anchor
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return output.detach()  # the same storage: an in-place activation may follow

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *others: Any) -> Tensor | None:
        del ctx, others
        return None if tangent is None else tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, ...]:
        return _show(ctx, cotangent), None, None, None


class _InPlaceTap(torch.autograd.Function):
    """A tap on a tensor that was changed in place, and stays the user's tensor.

    It must be the first argument: where it is a view, autograd puts its base in the place of the
    first tensor that the node has as an input.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, use: Use, anchor: Tensor, saved: Sequence[Tensor]
    ) -> Tensor:
        del anchor
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(output)
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *others: Any) -> Tensor | None:
        del ctx, others
        return None if tangent is None else tangent.mul_(1)  # autograd asks for a change in place

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, ...]:
        passed_on = _show(ctx, cotangent)
        if passed_on is None and cotangent is not None:
            # Zeros and not `None`, with which autograd would drop what lies beside a slice, too.
            passed_on = torch.zeros_like(cotangent)
        return passed_on, None, None, None


class _Unbatch(torch.autograd.Function):
    """Hands on a cotangent with the leading dimension that a batched pass hides."""

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


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``, without the look for `torch.func` transforms, which takes as long again.

    The recorder sees to it that there are none.
    """
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # as typed in torch


def _show(ctx: Any, cotangent: Tensor | None) -> Tensor | None:
    """The backward pass of both taps: shows the cotangent, and gives what is passed on."""
    current = running_pass()
    if current is None or cotangent is None:
        return cotangent
    use: Use = ctx.use
    if use.recording.channel is not current.channel:
        return cotangent
    if current.reach(use.recording):
        saved = ctx.saved_tensors  # read once: under checkpointing, reading computes again
        if current.hidden is None:
            current.show(use, saved, cotangent.unsqueeze(0))
        else:
            show = partial(current.show, use, saved)
            _Unbatch.apply(cotangent, show, current.hidden)  # type: ignore[no-untyped-call]  # as typed in torch
    return None if current.is_blocked else cotangent
