"""Taps: identity nodes that show a use's cotangent to the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autogram._capture.autograd.exact import autocast_dtype
from autogram._capture.autograd.nested import running_pass
from autogram._capture.uses import Use


def tap(use: Use, output: Tensor, saved: Sequence[Tensor], *, in_place: bool = False) -> Tensor:
    """Puts a tap on one result of a use. The tap saves the tensors that the use needs.

    Returns:
        The tensor behind the tap. After an in-place call, it is the same tensor as before.
    """
    recording = use.recording
    recording.count += 1
    if torch._C._is_any_autocast_enabled() and (dtype := autocast_dtype(output.device.type)):
        recording.dtypes.add(dtype)  # the output's dtype may hide it
    if not in_place:
        return _apply(output, use, recording.channel.anchor, saved, False)
    # The values stay as they are, so what the call saved of its own result is still valid.
    with torch.autograd._unsafe_preserve_version_counter(output):  # type: ignore[attr-defined]  # as exported
        _apply(output, use, recording.channel.anchor, saved, True)
    return output


def _no_view(tensor: Tensor) -> Tensor:
    """A tensor of a subclass, as no view: it is a view of one without the class.

    PyTorch lets nobody change a view in place that a custom autograd Function returned.
    """
    found = Tensor._make_subclass(type(tensor), tensor)
    found.__dict__.update(tensor.__dict__)
    return found


class _Tap(torch.autograd.Function):
    """Identity. Tensors are kept by autograd, to be freed and off-loaded with the graph.

    After an in-place call, the output is the user's own tensor. The output must be the first
    argument: where it is a view, autograd puts its base in the place of the first tensor that the
    node has as an input.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, use: Use, anchor: Tensor, saved: Sequence[Tensor], in_place: bool
    ) -> Tensor:
        del anchor
        ctx.use, ctx.in_place = use, in_place
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if not in_place:
            tapped = output.detach()  # the same storage: an in-place activation may follow
            return tapped if tapped._base is None else _no_view(tapped)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *others: Any) -> Tensor | None:
        del others
        if tangent is None:
            return None
        # For an in-place function, autograd wants the tangent changed in place, too.
        return tangent.mul_(1) if ctx.in_place else tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, ...]:
        current, use = running_pass(), ctx.use
        passed_on = cotangent
        if current and cotangent is not None and use.recording.channel is current.channel:
            if current.reach(use.recording):
                saved = ctx.saved_tensors  # once: under checkpointing, that computes again
                current.show(partial(current.receiver, use, saved), cotangent, saved)
            if current.is_blocked:
                # In place, zeros: with `None` autograd would drop the gradient beside a slice, too.
                passed_on = torch.zeros_like(cotangent) if ctx.in_place else None
        return passed_on, None, None, None, None


# `apply` without the check for `torch.func` transforms, which would double its time: the recorder
# has checked that there are none.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Tap).apply
