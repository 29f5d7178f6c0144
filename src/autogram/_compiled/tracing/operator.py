"""The operator that marks, in the joint graph of a compiled region, where a cotangent is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("autogram", "DEF")  # lasts as long as the module
_LIBRARY.define("show(Tensor cotangent, Tensor[] saved, int use) -> Tensor")


def _show(cotangent: Tensor, saved: Sequence[Tensor], use: int) -> Tensor:
    """The cotangent itself. No variant of a backward pass has the operator, so this never runs."""
    del saved, use
    return cotangent.clone()


def _show_shape(cotangent: Tensor, saved: Sequence[Tensor], use: int) -> Tensor:
    """A tensor like the result."""
    del saved, use
    return torch.empty_strided(
        cotangent.shape, cotangent.stride(), dtype=cotangent.dtype, device=cotangent.device
    )


_LIBRARY.impl("show", _show, "CompositeExplicitAutograd")
torch.library.register_fake("autogram::show", _show_shape, lib=_LIBRARY)

SHOW: Any = torch.ops.autogram.show.default


class TracedTap(torch.autograd.Function):
    """Identity. In the joint graph, its backward is a call of the operator."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, use: Any, *saved: Tensor) -> Tensor:
        ctx.use = use  # by which the recorder knows the node as a tap
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        # AOTAutograd repeats what makes an output from one that shares its memory: a `detach` would
        # cut its gradient off.
        found: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
        return found

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if cotangent is not None:
            cotangent = SHOW(cotangent, [x.detach() for x in saved], ctx.use.index)
        return cotangent, None, *[None] * len(saved)
