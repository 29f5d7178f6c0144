"""The scale of a gradient scaler: the losses are scaled, the weighting's Gramian is unscaled.

If something overflows, weights and gradients are NaN, so that the scaler skips the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.amp import GradScaler

from autogram._capture.backward.driver import expecting_overflow
from autogram._weights import (
    FiniteWeights,
    Weighting,
    check_finite,
    check_weighting,
    weights_by,
)
from autogram.errors import InvalidOperandError, InvalidOptionError


class Scale:
    """The scale of one step, and the weighting of its Gramian. Without a scaler, the scale is 1."""

    def __init__(self, weighting: Weighting, scaler: GradScaler | None) -> None:
        self._weighting = weighting
        self._scaler = scaler
        self._scales: list[Tensor] = []  # one for each application, on the device

    def check(self) -> None:
        """Checks the weighting and the scaler. Call it first.

        Raises:
            InvalidOperandError: The weighting is not a function of a Gramian.
            InvalidOptionError: The scaler is not a gradient scaler.
        """
        check_weighting(self._weighting)
        scaler = self._scaler
        if scaler is None:
            return
        is_class = isinstance(scaler, type)
        if is_class or not (hasattr(scaler, "scale") and hasattr(scaler, "is_enabled")):
            raise InvalidOptionError(
                f"`scaler` is a {type(scaler).__name__}. Pass the `torch.amp.GradScaler` whose "
                "`step` and `update` the training loop calls, or `None`."
            )
        if not scaler.is_enabled():
            self._scaler = None

    @contextmanager
    def applied(self, losses: Tensor) -> Iterator[Tensor]:
        """Gives the scaled losses to a block, whose passes may overflow with a scaler."""
        if self._scaler is not None:
            # Public, and it does not wait for the device, as `get_scale` does.
            self._scales.append(self._scaler.scale(torch.ones((), device=losses.device)))
            losses = self._scaler.scale(losses)
        with expecting_overflow(self._scaler is not None):
            yield losses

    def weights(self, gramian: Tensor) -> Tensor:
        """Unscales the Gramian of the scaled losses, then computes the weights.

        If the Gramian is not finite, they are NaN, and the user's function is not called.

        Raises:
            NonFiniteError: The Gramian of scaled losses is finite, and the weights are not.
        """
        if self._scaler is None:
            return weights_by(self._weighting, gramian)
        gramian = self.unscaled(gramian)
        if not bool(gramian.isfinite().all()):
            return gramian.new_full((len(gramian),), torch.nan)
        if len(self._scales) > 1:
            self.number()
        weights = weights_by(self._weighting, gramian)
        check_finite(weights, gramian.dtype, gramian)  # else the scaler would skip each step
        return weights

    def usable(self, weights: Tensor, gramian: Tensor, finite: FiniteWeights) -> Tensor:
        """Weights that may be multiplied into ``.grad``.

        With a scaler, all weights may, even NaN: the scaler skips the step.

        Raises:
            NonFiniteError: Without a scaler, the weights are not finite.
        """
        if self._scaler is not None:
            return weights
        return finite.usable(weights, gramian.dtype, gramian)

    def unscaled(self, gramian: Tensor) -> Tensor:
        """The Gramian of the losses: exact, because scales are powers of two by default."""
        if self._scaler is None:
            return gramian
        return gramian / self._scales[0] / self._scales[0]

    def number(self) -> float:
        """The scale of all losses, or zero without a scaler. Waits for the device.

        Raises:
            InvalidOperandError: The scale was not the same for all of them.
        """
        if self._scaler is None:
            return 0.0
        numbers = {float(scale) for scale in self._scales}
        if len(numbers) > 1:
            raise InvalidOperandError(
                "Call `scaler.update()` after the block: the scale has changed between the "
                "micro-batches of one step, and their losses have different factors."
            )
        return numbers.pop()
