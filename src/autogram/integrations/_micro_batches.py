"""A step of an engine whose micro-batches come one by one from another library's loop."""

from __future__ import annotations

from typing import Any

from torch.amp import GradScaler

from autogram import Engine
from autogram._engine.accumulation import Accumulation
from autogram._engine.steps import GradientsOutside, check_outside
from autogram._losses import Losses
from autogram._weights import Weighting, check_weighting


class MicroBatches:
    """Collects losses until the loop says that a step is complete.

    Args:
        engine: The engine of the model.
        weighting: The weighting of the Gramian of all objectives of a step.
        gradients_outside: As for :meth:`autogram.Engine.backward`.
    """

    def __init__(
        self, engine: Engine, weighting: Weighting, gradients_outside: GradientsOutside
    ) -> None:
        check_weighting(weighting)
        check_outside(gradients_outside)
        self.engine = engine
        self._weighting, self._outside = weighting, gradients_outside
        self._open: Accumulation | None = None

    def add(self, losses: Losses, *, is_last: bool, scaler: GradScaler | None) -> list[Any] | None:
        """Adds the losses of a micro-batch.

        Returns:
            The weights of each micro-batch of the step, if this one was the last. The gradients
            are then in ``.grad``.
        """
        if self._open is None:
            if is_last:  # in one piece, without keeping factors
                weights = self.engine.backward(
                    losses, self._weighting, scaler=scaler, gradients_outside=self._outside
                )
                return [weights]
            self._open = self.engine.accumulate(
                self._weighting, scaler=scaler, gradients_outside=self._outside
            ).__enter__()
        batch, self._open = self._open, None  # an error ends the step
        batch.add(losses)
        if not is_last:
            self._open = batch
            return None
        batch.__exit__(None, None, None)
        return batch.weights

    def forget(self) -> None:
        """Forgets a step that is not complete."""
        self._open = None

    def close(self) -> None:
        """Forgets a step that is not complete, and removes the engine from the model."""
        self.forget()
        self.engine.remove()
