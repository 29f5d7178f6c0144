"""Steps with a gradient scaler: where something overflows, gradients that make it skip the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor

from autogram._arguments import Weighting, check_weighting
from autogram._capture import expecting_overflow
from autogram._errors import InvalidOptionError, NonFiniteError
from autogram._losses import Losses, in_form, parts_of

if TYPE_CHECKING:
    from autogram._engine import Engine


class Scaler(Protocol):
    """What is needed of a `torch.amp.GradScaler`."""

    def scale(self, outputs: Any) -> Any:
        """Outputs times the scale."""

    def is_enabled(self) -> bool:
        """Whether it scales at all."""


def is_scaling(scaler: Scaler | None) -> TypeGuard[Scaler]:
    """Whether there is a scaler, and it is enabled.

    Raises:
        InvalidOptionError: It is none.
    """
    if scaler is None:
        return False
    if not (hasattr(scaler, "scale") and hasattr(scaler, "is_enabled")):
        raise InvalidOptionError(
            f"`scaler` is a {type(scaler).__name__}. Pass the `torch.amp.GradScaler` whose `step` "
            "and `update` the training loop calls, or `None`."
        )
    return scaler.is_enabled()


class _Scaled:
    """Losses times the scale, and a weighting that knows nothing of it.

    Args:
        losses: In any form that the engine takes.
        weighting: The user's function of the Gramian of these losses.
        scaler: What knows the scale, which stays on the device.

    Attributes:
        losses: Times the scale.
        is_weighted: Whether the weighting was called.
    """

    def __init__(self, losses: Losses, weighting: Weighting, scaler: Scaler) -> None:
        check_weighting(weighting)
        parts = parts_of(losses)
        self.losses = in_form([scaler.scale(part) for part in parts], losses)
        # Public, and it does not wait for the device, as `get_scale` does.
        self._scale = scaler.scale(torch.ones((), device=parts[0].device)) if parts else 1
        self._weighting = weighting
        self.is_weighted = False

    def weighting(self, gramian: Tensor) -> Tensor:
        """The weights by the Gramian of the losses, from that of the scaled ones.

        They are not a number where it is not finite: the user's function is not asked then.
        """
        gramian = self.unscaled(gramian)
        if not bool(gramian.isfinite().all()):
            return gramian.new_full((len(gramian),), torch.nan)
        self.is_weighted = True
        return self._weighting(gramian)

    def unscaled(self, gramian: Tensor) -> Tensor:
        """The Gramian of the losses: exactly, as scales are powers of two unless told otherwise."""
        return gramian / self._scale / self._scale


def backward_scaled(
    engine: Engine, losses: Losses, weighting: Weighting, scaler: Scaler, *, retain_graph: bool
) -> tuple[Any, Tensor]:
    """``engine.backward`` for a scaler: gradients of the scaled losses, or ones to skip a step by.

    Returns:
        Weights, and the Gramian of the losses without the scale.
    """
    scaled = _Scaled(losses, weighting, scaler)
    try:
        with expecting_overflow():
            weights, gramian = engine.backward(
                scaled.losses, scaled.weighting, retain_graph=retain_graph, return_gramian=True
            )
    except NonFiniteError:
        if scaled.is_weighted:
            raise
        weights = _not_a_number(losses)
        torch.autograd.backward(parts_of(scaled.losses), parts_of(weights), retain_graph)
        m = sum(part.numel() for part in parts_of(losses))
        return weights, parts_of(weights)[0].new_full((m, m), torch.nan)
    return weights, scaled.unscaled(gramian)


def weights_scaled(engine: Engine, losses: Losses, weighting: Weighting, scaler: Scaler) -> Any:
    """``engine.weights`` for a scaler: not a number where something overflows."""
    scaled = _Scaled(losses, weighting, scaler)
    try:
        with expecting_overflow():
            return engine.weights(scaled.losses, scaled.weighting)
    except NonFiniteError:
        if scaled.is_weighted:
            raise
        return _not_a_number(losses)


def _not_a_number(losses: Losses) -> Any:
    """Weights with which every gradient is none that a scaler would take a step by."""
    weights = [
        torch.full_like(x, torch.nan, dtype=torch.promote_types(x.dtype, torch.float32))
        for x in parts_of(losses)
    ]
    return in_form(weights, losses)
