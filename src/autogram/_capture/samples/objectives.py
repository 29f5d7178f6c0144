"""Objectives: the losses as K per sample, and the cotangents that differentiate them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Folded


@dataclass(frozen=True)
class Objectives:
    """m = K * B elements of the losses: K objectives for each of B samples.

    Attributes:
        losses: The tensor to differentiate.
        batch_dim: The dimension of the samples, or ``None`` where the batch is one sample.
    """

    losses: Tensor
    batch_dim: int | None

    @cached_property
    def samples(self) -> int:
        """The number B of samples."""
        return 1 if self.batch_dim is None else self.losses.shape[self.batch_dim]

    @cached_property
    def per_sample(self) -> int:
        """The number K of objectives of each sample."""
        others = list(self.losses.shape)
        if self.batch_dim is not None:
            del others[self.batch_dim]
        return prod(others)  # also of no samples

    @property
    def layout(self) -> Folded | None:
        """Where the samples are in the losses."""
        if self.batch_dim is None:
            return None
        return Folded(self.batch_dim % self.losses.dim(), 1, self.samples, 1)

    def cotangents(self) -> Tensor:
        """For each objective of a sample, ones there for all samples at once: ``(k, *losses)``.

        All samples can go together because each has its own places in every activation.
        """
        k, b = self.per_sample, self.samples
        options: Any = {"dtype": self.losses.dtype, "device": self.losses.device}
        if k == 1:
            return torch.ones(1, *self.losses.shape, **options)  # in one launch
        eye = torch.eye(k, **options)
        return self._by_loss(eye.unsqueeze(-1).repeat(1, 1, b))

    def by_sample(self, values: Tensor) -> Tensor:
        """``(*, *losses)`` as ``(*, k, b)``."""
        stack = values.shape[: values.dim() - self.losses.dim()]
        if self.batch_dim is not None:
            values = values.movedim(len(stack) + self.batch_dim % self.losses.dim(), -1)
        return values.reshape(*stack, self.per_sample, self.samples)

    def numbers(self, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """Numbers of the objectives, ``(k, b)``, from ``start`` on in row-major order."""
        numbers = torch.arange(start, start + self.losses.numel(), device=device)
        return self.by_sample(numbers.view(self.losses.shape))

    def in_order(self, values: Tensor, *dims: int) -> Tensor:
        """Values that come in the order ``(k, b)`` along ``dims``, in the order of the losses."""
        if 1 in (self.per_sample, self.samples):
            return values
        order = torch.arange(self.losses.numel(), device=values.device)
        order = self._by_loss(order.view(1, self.per_sample, self.samples)).flatten()
        for dim in dims:
            values = values.index_select(dim, order)
        return values

    def _by_loss(self, values: Tensor) -> Tensor:
        """``(n, k, b)`` as ``(n, *losses)``."""
        shape = list(self.losses.shape)
        if self.batch_dim is not None:
            dim = self.batch_dim % len(shape)
            del shape[dim]
            values = values.reshape(-1, *shape, self.samples).movedim(-1, dim + 1)
        return values.reshape(-1, *self.losses.shape)
