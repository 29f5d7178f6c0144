"""For accelerate: steps of an engine in the loop of an ``Accelerator``.

Needs accelerate, which this file imports.
"""

from __future__ import annotations

from typing import Any

from autogram import Engine, UnsupportedError
from autogram._engine.steps import GradientsOutside
from autogram._extras import extra
from autogram._losses import Losses
from autogram._weights import Weighting
from autogram.integrations._micro_batches import MicroBatches

with extra("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

__all__ = ["Accelerated"]


class Accelerated:
    """Replaces ``accelerator.backward``, for losses and a weighting instead of one loss.

    It uses the accelerator's gradient scaler, and its accumulation: all micro-batches of a
    step have one Gramian and one set of weights. Unlike ``accelerator.backward``, it does not
    divide by the number of micro-batches, because the weights cover all objectives.

    Args:
        engine: The engine of the model, made before or after ``accelerator.prepare``.
        weighting: As for :meth:`autogram.Engine.backward`.
        accelerator: The accelerator that has prepared the optimizer.
        gradients_outside: As for :meth:`autogram.Engine.backward`.

    Raises:
        InvalidOperandError: The weighting is not a function of a Gramian.
        InvalidOptionError: ``gradients_outside`` has another value.
        UnsupportedError: The accelerator leaves backward passes to DeepSpeed or Megatron-LM.

    Example:
        `docs/trainers.md` shows a training.
    """

    def __init__(
        self,
        engine: Engine,
        weighting: Weighting,
        accelerator: Accelerator,
        *,
        gradients_outside: GradientsOutside = "sum",
    ) -> None:
        refuse_other_engines(accelerator)
        self._micro_batches = MicroBatches(engine, weighting, gradients_outside)
        self._accelerator = accelerator

    def backward(self, losses: Losses) -> list[Any] | None:
        """Adds the losses of a micro-batch; at the last one of a step, computes the gradients.

        Args:
            losses: As for :meth:`autogram.Engine.backward`.

        Returns:
            For the last micro-batch, the weights of each micro-batch in the form of its losses,
            NaN if the gradient scaler should skip the step; otherwise ``None``.

        Raises:
            AutogramError: As for :meth:`autogram.Engine.backward`. The step begins anew.
        """
        return self._micro_batches.add(
            losses, is_last=self._accelerator.sync_gradients, scaler=self._accelerator.scaler
        )

    def forget(self) -> None:
        """Forgets the micro-batches of an incomplete step, such as when a loop begins anew."""
        self._micro_batches.forget()


def refuse_other_engines(accelerator: Accelerator) -> None:
    """Refuses an accelerator that leaves backward passes to another library.

    Raises:
        UnsupportedError: It uses DeepSpeed or Megatron-LM.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise UnsupportedError(
            f"The accelerator leaves backward passes to {accelerator.distributed_type.value}, "
            "which does not know the weights. Use an accelerator without it, or call "
            "`engine.weights`, and pass the weighted losses to it."
        )
