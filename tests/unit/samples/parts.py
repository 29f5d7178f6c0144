"""Parts of models, for tests of what runs again."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Doubled(torch.autograd.Function):
    """In Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * 2


class Kept:
    """A part that counts which of its activations are alive."""

    def __init__(self, part: Callable[[nn.Module, Tensor], Tensor]) -> None:
        self._part = part
        self._seen: list[weakref.ref[Tensor]] = []

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        inner = x.sin()
        self._seen.append(weakref.ref(inner))
        return self._part(layer, inner.cos())

    def alive(self) -> int:
        """How many are alive."""
        return sum(reference() is not None for reference in self._seen)
