"""Objectives: the losses as K per sample, and the cotangents that differentiate them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
        """B."""
        return 1 if self.batch_dim is None else self.losses.shape[self.batch_dim]

    @cached_property
    def per_sample(self) -> int:
        """K."""
        return self.losses.numel() // self.samples

    @property
    def are_finite(self) -> bool:
        """Whether all objectives are finite."""
        return bool(self.is_finite.all())

    @cached_property
    def is_finite(self) -> Tensor:
        """Whether all objectives of a sample are finite, ``(B,)``, on the CPU."""
        finite = self.losses.isfinite()
        if self.batch_dim is None:
            return finite.all().view(1).cpu()
        return finite.movedim(self.batch_dim, 0).reshape(self.samples, -1).all(1).cpu()

    @property
    def layout(self) -> Folded | None:
        """Where the samples lie in the losses."""
        if self.batch_dim is None:
            return None
        return Folded(self.batch_dim % self.losses.dim(), 1, self.samples, 1)

    def cotangents(self) -> Tensor:
        """One-hot over the objectives of a sample, for all samples at once: ``(k, *losses)``.

        All samples can go together because each has its own place in every activation.
        """
        k, b = self.per_sample, self.samples
        if k == 1:
            return self.losses.new_ones(1, *self.losses.shape)
        eye = torch.eye(k, dtype=self.losses.dtype, device=self.losses.device)
        return self._arrange(eye.unsqueeze(-1).expand(k, k, b))

    def by_sample(self, values: Tensor) -> Tensor:
        """Values of the shape of the losses as ``(k, b)``."""
        if self.batch_dim is None:
            return values.reshape(-1, 1)
        return values.movedim(self.batch_dim, -1).reshape(-1, self.samples)

    def weighted(self, weights: Tensor) -> Tensor:
        """A weight for each sample, ``(b,)``, as a cotangent ``(1, *losses)``.

        The objectives of a sample get different multiples of it: with equal ones, outputs that add
        up to a constant, such as probabilities, would have no gradient.
        """
        k, b = self.per_sample, self.samples
        cotangent = self.losses.new_zeros(1, k, b)
        multiples = torch.linspace(1.0, 2.0, k, dtype=cotangent.dtype, device=cotangent.device)
        cotangent[0] = multiples.unsqueeze(1) * weights.to(multiples)
        return self._arrange(cotangent)

    def arrange_gramian(self, gramian: Tensor) -> Tensor:
        """``(k, b, k, b)`` as ``(m, m)``, in the row-major order of the losses."""
        m = self.losses.numel()
        gramian = gramian.reshape(m, m)
        if self.is_in_order:
            return gramian
        places = self.places.to(gramian.device)
        return gramian[places][:, places]

    @property
    def is_in_order(self) -> bool:
        """Whether ``(k, b)``, flattened, is the row-major order of the losses."""
        return 1 in (self.per_sample, self.samples)

    @property
    def places(self) -> Tensor:
        """Where each loss, in row-major order, is among ``(k, b)``, flattened: ``(m,)``."""
        order = torch.arange(self.losses.numel(), device="cpu")
        return self._arrange(order.view(1, self.per_sample, self.samples)).flatten()

    def _arrange(self, tensor: Tensor) -> Tensor:
        """``(n, k, b)`` as ``(n, *losses)``."""
        if self.batch_dim is None:
            return tensor.reshape(len(tensor), *self.losses.shape)
        dim = self.batch_dim % self.losses.dim()
        others = [n for d, n in enumerate(self.losses.shape) if d != dim]
        by_loss: Tensor = tensor.unflatten(1, others or [1])
        return by_loss.movedim(-1, dim + 1).reshape(-1, *self.losses.shape)
