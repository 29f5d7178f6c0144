"""Measures of conflict from a Gramian, as a few numbers on its device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite, log, nan

import torch
from torch import Tensor

from autogram._arguments import check_square


@dataclass(frozen=True)
class Numbers:
    """One Gramian and its weights, in a few numbers.

    Undefined numbers are NaN: those of pairs for a single objective, and all numbers of
    a Gramian that is not finite. None is infinite.

    Attributes:
        conflicting: Share of the pairs of objectives whose gradients have a negative inner product.
        mean_cosine: Mean cosine of the angle between two gradients, over all pairs. A gradient of
            length zero has the cosine zero with all others.
        least_cosine: The smallest of these cosines.
        mean_norm: Mean Euclidean norm of a gradient.
        largest_norm: The largest of these norms.
        effective_rank: The participation ratio tr(G)² / ‖G‖² of the eigenvalues of G, from 1, if
            all gradients are parallel, to m, if they are orthogonal and equally long.
        noise: Estimate of the variance of one gradient, tr(S); unbiased if the objectives are
            independent samples.
        signal: Estimate of the squared norm of the expected gradient, unbiased like ``noise``;
            it may therefore be negative.
        entropy: Entropy of the absolute weights, divided by its maximum log(m): 1 if they
            are equal, 0 if only one is not zero.

    References:
        McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018,
        arXiv:1812.06162, appendix A: noise and signal.
        Gao, Trautmann, Yu et al., A theory of multineuronal dimensionality, dynamics and
        measurement, 2017, bioRxiv:214262: the participation ratio.
    """

    conflicting: float
    mean_cosine: float
    least_cosine: float
    mean_norm: float
    largest_norm: float
    effective_rank: float
    noise: float
    signal: float
    entropy: float

    @property
    def noise_scale(self) -> float:
        """``noise / signal``: the batch size at which both are equal, from this Gramian alone.

        NaN if the estimate of the signal is not positive.
        """
        return ratio(self.noise, self.signal)


NAMES = tuple(field.name for field in fields(Numbers))


def cosines(gramian: Tensor) -> Tensor:
    """Cosines of the angles between all pairs of gradients.

    Args:
        gramian: ``(m, m)``.

    Returns:
        ``(m, m)``, with ones on the diagonal. A gradient of length zero has no direction: its
        cosines are zero, even with itself.
    """
    check_square(gramian)
    norms = gramian.diagonal().clamp(min=0).sqrt()
    scale = torch.where(norms > 0, norms.reciprocal(), 0)
    return gramian * scale * scale.unsqueeze(1)


def noise_and_signal(gramian: Tensor) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of tr(S) and of the squared norm of the expected gradient.

    S is the covariance of one sample's gradient. Average each estimate over steps before
    dividing them: the ratio of two estimates from one batch is biased.

    Args:
        gramian: ``(m, m)``, of independent samples. For one sample, both estimates are NaN.

    References:
        McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, appendix A.
    """
    check_square(gramian)
    m, mean = len(gramian), gramian.mean()
    noise = (gramian.diagonal().mean() - mean) * (m / (m - 1) if m > 1 else nan)
    return noise, mean - noise / m


def numbers_of(gramian: Tensor) -> Tensor:
    """All of ``NAMES`` except the entropy, in a vector on the Gramian's device, without waiting."""
    m = len(gramian)
    pairs = m * (m - 1)
    squares = gramian.diagonal()
    norms = squares.clamp(min=0).sqrt()
    off_diagonal = cosines(gramian).fill_diagonal_(0)
    least = off_diagonal.clone().fill_diagonal_(2).amin()
    mean = off_diagonal.sum() / (pairs or nan)
    noise, signal = noise_and_signal(gramian)
    numbers = [
        (gramian < 0).sum() / (pairs or nan),
        mean,
        least if pairs else least * nan,
        norms.mean(),
        norms.amax(),
        (gramian / squares.sum()).square().sum().reciprocal(),
        noise,
        signal,
    ]
    # The sum makes all of them NaN if an entry is not finite.
    return torch.stack([number.to(gramian.dtype) for number in numbers]) + 0 * gramian.sum()


def entropy_of(weights: Tensor) -> Tensor:
    """The entropy of the absolute weights over log(m), without waiting for the device."""
    shares = weights.flatten().abs()
    shares = shares / shares.sum()
    m = len(shares)
    entropy: Tensor = -torch.special.xlogy(shares, shares).sum()
    return entropy / (log(m) if m > 1 else nan)


def ratio(noise: float, signal: float) -> float:
    """Noise over signal; NaN if the estimate of the signal is not positive."""
    quotient = noise / signal if signal > 0 else nan
    return defined(quotient)


def defined(number: float) -> float:
    """A number, or NaN instead of infinity: a trace may be too large for the dtype."""
    return number if isfinite(number) else nan
