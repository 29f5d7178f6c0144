"""Weightings that change each gradient by the others, one after another: PCGrad and GradVac.

The changes of one gradient depend on each other, but the changes of different gradients do not.
One step therefore changes all m gradients, with an operation on (m, m) matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._arguments import is_number, not_negative
from autogram.errors import InvalidOptionError
from autogram.weightings.checks import check_gramian
from autogram.weightings.scale import WeightScale, check_scale, scaled


def _orders(gramian: Tensor) -> Tensor:
    """For each gradient, the others in random order, ``(m, m - 1)``."""
    m = len(gramian)
    keys = torch.rand(m, m, device=gramian.device)
    keys.fill_diagonal_(2.0)  # a gradient itself comes last, and is dropped
    return keys.argsort(dim=1)[:, : m - 1]


class PCGrad:
    """The weights of PCGrad: each gradient is projected off conflicting gradients, in turn.

    The method is that of torchjd's ``PCGradWeighting``. The random orders are drawn on the
    Gramian's device, so they differ from torchjd's for the same seed.

    Args:
        scale: ``"method"`` leaves the weights as the method defines them. ``"mean"`` divides them
            by their sum, so that a learning rate for the mean loss keeps its meaning.

    Raises:
        InvalidOptionError: ``scale`` has another value.

    Example:
        >>> import torch
        >>> from autogram.weightings import PCGrad
        >>> PCGrad()(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]))
        tensor([1.5000, 1.5000])

    References:
        Yu et al., Gradient Surgery for Multi-Task Learning, 2020, arXiv:2001.06782, algorithm 1.
    """

    def __init__(self, *, scale: WeightScale = "method") -> None:
        check_scale(scale)
        self.scale: WeightScale = scale

    @torch.no_grad()
    def __call__(self, gramian: Tensor) -> Tensor:
        """The weights ``(m,)`` for a Gramian ``(m, m)``, in its dtype and on its device.

        Cost: m operations on (m, m) matrices; the check of the Gramian waits for a GPU once.

        Raises:
            InvalidOperandError: The matrix is not a Gramian.
            NonFiniteError: It has entries that are infinite or not a number.
        """
        check_gramian(gramian)
        weights = torch.eye(len(gramian), dtype=gramian.dtype, device=gramian.device)
        squares = gramian.diagonal()
        for others in _orders(gramian).unbind(1):  # (m,)
            products = (weights * gramian[others]).sum(1)
            square = squares[others]
            steps = torch.where(products < 0, -products / square, 0)
            weights.scatter_add_(1, others.unsqueeze(1), steps.unsqueeze(1))
        return scaled(weights.sum(0), self.scale)


class GradVac:
    """The weights of GradVac: gradients whose cosine is below its target are moved closer.

    The method and its parameters are those of torchjd's ``GradVacWeighting``. The target of a pair
    of gradients is a moving average of its cosines. Targets start at zero, and start again if the
    number of objectives changes.

    Args:
        beta: The weight of a new cosine in the moving average, from 0 to 1.
        eps: A number that is added to denominators.
        scale: ``"method"`` leaves the weights as the method defines them. ``"mean"`` divides them
            by their sum, so that a learning rate for the mean loss keeps its meaning.

    Raises:
        InvalidOptionError: ``beta`` is not in [0, 1], ``eps`` is negative, or ``scale`` has
            another value.

    References:
        Wang et al., Gradient Vaccine: Investigating and Improving Multi-task Optimization in
        Massively Multilingual Models, 2020, arXiv:2010.05874, algorithm 1.
    """

    def __init__(
        self, beta: float = 0.5, eps: float = 1e-8, *, scale: WeightScale = "method"
    ) -> None:
        if not (is_number(beta) and 0 <= beta <= 1):
            raise InvalidOptionError(f"The option `beta` is {beta!r}. Pass a number from 0 to 1.")
        check_scale(scale)
        self.scale: WeightScale = scale
        self.beta = float(beta)
        self.eps = not_negative("eps", eps)
        self._targets: Tensor | None = None

    def reset(self) -> None:
        """Lets the targets start at zero again."""
        self._targets = None

    @torch.no_grad()
    def __call__(self, gramian: Tensor) -> Tensor:
        """The weights ``(m,)`` for a Gramian ``(m, m)``, in its dtype and on its device.

        Cost: a few times m operations on (m, m) matrices; the check of the Gramian waits for a GPU
        once.

        Raises:
            InvalidOperandError: The matrix is not a Gramian.
            NonFiniteError: It has entries that are infinite or not a number.
        """
        check_gramian(gramian)
        m = len(gramian)
        if self._targets is None or self._targets.shape != gramian.shape:
            self._targets = torch.zeros_like(gramian)
        targets = self._targets = self._targets.to(gramian)
        weights = torch.eye(m, dtype=gramian.dtype, device=gramian.device)
        products = gramian.clone()  # of the changed gradients with the first ones
        norms = gramian.diagonal().clamp(min=0).sqrt()
        for others in _orders(gramian).unbind(1):
            index = others.unsqueeze(1)
            norm = (products * weights).sum(1).clamp(min=0).sqrt()
            target = targets.gather(1, index).squeeze(1)
            cosine = products.gather(1, index).squeeze(1) / (norm * norms[others] + self.eps)
            sine, wanted = ((1 - x.square()).clamp(min=0).sqrt() for x in (cosine, target))
            step = norm * (target * sine - cosine * wanted) / (norms[others] * wanted + self.eps)
            step = torch.where(cosine < target, step, 0)
            weights.scatter_add_(1, index, step.unsqueeze(1))
            products += step.unsqueeze(1) * gramian[others]
            targets.scatter_(1, index, torch.lerp(target, cosine, self.beta).unsqueeze(1))
        return scaled(weights.sum(0), self.scale)
