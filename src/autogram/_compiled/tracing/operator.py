"""The operators of taps in a compiled region.

``show`` marks, in the joint graph, where a cotangent is shown. ``tap`` returns the tapped tensor.
AOTAutograd must not take it for a view of the tensor before: it repeats views outside of the
region, and would cut off the gradient. In the graph, both are one tensor (`DECOMPOSITIONS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("autogram", "DEF")  # exists as long as the module
_LIBRARY.define("show(Tensor cotangent, Tensor[] saved, int use) -> Tensor")
_LIBRARY.define("tap(Tensor output) -> Tensor")


def _show(cotangent: Tensor, saved: Sequence[Tensor], use: int) -> Tensor:
    """The cotangent itself. It never runs: no variant of a backward pass has the operator."""
    del saved, use
    return cotangent.clone()


def _like(tensor: Tensor, *others: Any) -> Tensor:
    """A tensor like the result."""
    del others
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


_LIBRARY.impl("show", _show, "CompositeExplicitAutograd")
_LIBRARY.impl("tap", torch.clone, "CompositeExplicitAutograd")  # never runs, either
for _name in ("show", "tap"):
    torch.library.register_fake(f"autogram::{_name}", _like, lib=_LIBRARY)

SHOW: Any = torch.ops.autogram.show.default
_TAP: Any = torch.ops.autogram.tap.default

DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {_TAP: lambda output: output}
"""Replacements for AOTAutograd to make in the graphs of regions."""


class TracedTap(torch.autograd.Function):
    """Identity. In the joint graph, its backward is a call of the operator."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, use: Any, *saved: Tensor) -> Tensor:
        ctx.use = use  # identifies the node as a tap to the recorder
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        tapped: Tensor = _TAP(output)
        return tapped

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if cotangent is not None:
            cotangent = SHOW(cotangent, [x.detach() for x in saved], ctx.use.index)
        return cotangent, None, *[None] * len(saved)
