"""Steps with a gradient scaler: where something overflows, gradients that make it skip the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor

from autogram._arguments import Weighting, check_weighting
from autogram._capture import BatchDim, add_to_grad, expecting_overflow, leaves_behind
from autogram._engine.accumulation import Accumulation
from autogram._engine.steps import Step
from autogram._errors import InvalidOperandError, InvalidOptionError, NonFiniteError
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


class _Scale:
    """Losses times the scale, and a weighting that knows nothing of it.

    Args:
        weighting: The user's function of the Gramian of the losses.
        scaler: What knows the scale, which stays on the device.

    Attributes:
        is_weighted: Whether the weighting was called.
    """

    def __init__(self, weighting: Weighting, scaler: Scaler) -> None:
        check_weighting(weighting)
        self._weighting = weighting
        self._scaler = scaler
        self._scales: list[Tensor] = []
        """That of each call of :meth:`losses`."""
        self.is_weighted = False

    def losses(self, losses: Losses) -> Any:
        """Losses times the scale, in their form."""
        parts = parts_of(losses)
        # Public, and it does not wait for the device, as `get_scale` does.
        self._scales.append(self._scaler.scale(torch.ones((), device=parts[0].device)))
        return in_form([self._scaler.scale(part) for part in parts], losses)

    def weighting(self, gramian: Tensor) -> Tensor:
        """The weights by the Gramian of the losses, from that of the scaled ones.

        They are not a number where it is not finite: the user's function is not asked then.
        """
        gramian = self.unscaled(gramian)
        if not bool(gramian.isfinite().all()):
            return gramian.new_full((len(gramian),), torch.nan)
        if any(scale != self._scales[0] for scale in self._scales[1:]):
            raise InvalidOperandError(
                "The scale has changed between the micro-batches of one step, whose losses have "
                "different factors now. Call `scaler.update()` behind the block."
            )
        self.is_weighted = True
        return self._weighting(gramian)

    def unscaled(self, gramian: Tensor) -> Tensor:
        """The Gramian of the losses: exactly, as scales are powers of two unless told otherwise."""
        return gramian / self._scales[0] / self._scales[0]


def backward_scaled(
    engine: Engine, losses: Losses, weighting: Weighting, scaler: Any, *, retain_graph: bool
) -> tuple[Any, Tensor]:
    """``engine.backward`` for a scaler: gradients of the scaled losses, or ones to skip a step by.

    Returns:
        Weights, and the Gramian of the losses without the scale.
    """
    scale = _Scale(weighting, scaler)
    scaled = scale.losses(losses)
    try:
        with expecting_overflow():
            weights, gramian = engine.backward(
                scaled, scale.weighting, retain_graph=retain_graph, return_gramian=True
            )
    except NonFiniteError:
        if scale.is_weighted:
            raise
        return _spoil(scaled, retain_graph=retain_graph)
    return weights, scale.unscaled(gramian)


def weights_scaled(engine: Engine, losses: Losses, weighting: Weighting, scaler: Scaler) -> Any:
    """``engine.weights`` for a scaler: not a number where something overflows."""
    scale = _Scale(weighting, scaler)
    try:
        with expecting_overflow():
            return engine.weights(scale.losses(losses), scale.weighting)
    except NonFiniteError:
        if scale.is_weighted:
            raise
        return _not_a_number(losses)


class ScaledAccumulation(Accumulation):
    """An accumulation for a scaler: where a micro-batch overflows, the whole step is skipped.

    Args:
        scaler: The scaler.
        step: As for the base.
        weighting: As for the base.
        checked: As for the base.
        batch_dim: As for the base.
    """

    def __init__(
        self,
        scaler: Scaler,
        step: Step,
        weighting: Weighting,
        checked: Callable[[Losses], Tensor],
        batch_dim: BatchDim,
    ) -> None:
        self._scale = _Scale(weighting, scaler)
        super().__init__(step, self._scale.weighting, checked, batch_dim)
        self._spoilt: dict[Tensor, None] = {}
        """Leaves of a step that is to be skipped, whose gradients will be no numbers."""
        self._nans: list[Tensor] = []
        """Weights for such a step."""

    def _take(self, step: Step, losses: Tensor, *, retain_graph: bool) -> None:
        scaled = self._scale.losses(losses)
        self._nans.append(_not_a_number(scaled).flatten())
        if not self._spoilt:
            try:
                with expecting_overflow():
                    super()._take(step, scaled, retain_graph=retain_graph)
                return
            except NonFiniteError:
                self._spoilt.update(dict.fromkeys(step.leaves))
        # Leaves alone are needed of what is left. Each of several optimizers looks at its own.
        self._spoilt.update(dict.fromkeys(leaves_behind(scaled)))

    def _finish(self, step: Step) -> tuple[Tensor, Tensor]:
        if not self._spoilt:
            gramian, weights = super()._finish(step)
            return self._scale.unscaled(gramian), weights
        for leaf in self._spoilt:
            add_to_grad(leaf, torch.full_like(leaf, torch.nan))
        weights = torch.cat(self._nans)
        return torch.outer(weights, weights), weights


def _spoil(scaled: Losses, *, retain_graph: bool) -> tuple[Any, Tensor]:
    """Makes gradients not a number, and returns such weights and a Gramian."""
    weights = _not_a_number(scaled)
    parts = parts_of(weights)
    torch.autograd.backward(parts_of(scaled), parts, retain_graph)
    m = sum(part.numel() for part in parts)
    return weights, parts[0].new_full((m, m), torch.nan)


def _not_a_number(losses: Losses) -> Any:
    """Weights with which every gradient is none that a scaler would take a step by."""
    weights = [
        torch.full_like(x, torch.nan, dtype=torch.promote_types(x.dtype, torch.float32))
        for x in parts_of(losses)
    ]
    return in_form(weights, losses)
