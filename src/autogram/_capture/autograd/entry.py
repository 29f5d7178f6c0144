"""The way from engines into a call of a compiled graph, which autograd has as a single node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


def entry(
    calls: Sequence[Any], like: Tensor, anchors: Sequence[Tensor], saved: Sequence[Tensor]
) -> Tensor:
    """An input for a call of a compiled graph, which leads from its node to engines' anchors.

    Args:
        calls: For each engine, the object that it is shown of the call.
        like: The input that the call has where no engine sees the call.
        anchors: The anchors of the engines.
        saved: Tensors to keep for the engines.
    """
    like = like.detach()  # or it would be one more leaf that the losses depend on
    given: Tensor = _Entry.apply(calls, like, saved, *anchors)  # type: ignore[no-untyped-call]  # as typed in torch
    return given


def is_compiled(node: Any) -> bool:
    """Whether a node is a call of a compiled graph."""
    return isinstance(node, BackwardCFunction) and type(node).__name__ == _NAME


def entry_of(node: Any) -> Any | None:
    """The node that leads from a call of a compiled graph to engines, or ``None``."""
    if not is_compiled(node):
        return None
    for following, _ in reversed(node.next_functions):
        if isinstance(following, _Entry._backward_cls):
            return following
    return None


def calls_of(node: Any) -> Sequence[Any]:
    """The objects that engines are shown at a node, if it is a call of a compiled graph."""
    found = entry_of(node)
    return () if found is None else found.calls


_NAME = "CompiledFunctionBackward"  # of the nodes that AOTAutograd makes


class _Entry(torch.autograd.Function):
    """Has no gradient. Because of this node, passes to the anchors go through the compiled call."""

    @staticmethod
    def forward(
        ctx: Any, calls: Sequence[Any], like: Tensor, saved: Sequence[Tensor], *anchors: Tensor
    ) -> Tensor:
        ctx.calls, ctx.count = calls, len(anchors)
        ctx.save_for_backward(*saved)
        return like.view_as(like)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return (None,) * (3 + int(ctx.count))
