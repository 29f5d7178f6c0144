"""Parts of models, for tests of what runs again."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Squared(torch.autograd.Function):
    """The square, in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * 2


class Kept:
    """A part that counts how many of the tensors are alive that it has saved when it ran again.

    It saves constants: what requires a gradient is saved by another name.
    """

    def __init__(self, part: Callable[[nn.Module, Tensor], Tensor]) -> None:
        self._part = part
        self._seen: list[weakref.ref[Tensor]] = []

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        constant = torch.rand(x.shape) + 1
        self._seen.append(weakref.ref(constant))
        return self._part(layer, x * constant)

    def alive(self) -> int:
        """How many are alive."""
        return sum(reference() is not None for reference in self._seen)
