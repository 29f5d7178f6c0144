"""For Lightning: a mixin for modules whose steps are Jacobian descent.

Needs lightning or pytorch-lightning, whose modules the mixin is for; it imports neither.
"""

from __future__ import annotations

from typing import Any

import torch

from autogram import Engine, InvalidOptionError, UnsupportedError
from autogram._arguments import count_of
from autogram._losses import Losses, parts_of
from autogram._weights import Weighting
from autogram.integrations._micro_batches import MicroBatches

__all__ = ["JacobianDescent"]

# What it is mixed into, which nobody needs to install for the types.
_Module: Any = object


class JacobianDescent(_Module):  # type: ignore[misc]  # the methods of a `LightningModule`
    """A mixin for a ``LightningModule``, by manual optimization.

    The module has a ``weighting``, as for :meth:`autogram.Engine.backward`, and computes losses in
    ``training_losses`` instead of one loss in ``training_step``. Precision plugins, loggers,
    progress bars, callbacks and checkpoints work as ever. What Lightning offers for automatic
    optimization alone is to be said here: ``micro_batches`` in place of
    ``accumulate_grad_batches``, and a call of ``self.clip_gradients`` in
    ``on_before_optimizer_step`` in place of ``gradient_clip_val``. Schedulers are stepped in
    ``on_train_epoch_end``, as with any manual optimization.

    Attributes:
        weighting: Maps the Gramian of all objectives of a step to their weights.
        micro_batches: How many batches one step takes in; the last one of an epoch ends a step.

    Example:
        `docs/trainers.md` has one that trains.
    """

    weighting: Weighting
    micro_batches: int = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self._micro_batches: MicroBatches | None = None

    def training_losses(self, batch: Any, batch_idx: int) -> Losses:
        """Computes the objectives of a batch, as for :meth:`autogram.Engine.backward`.

        Args:
            batch: As for ``training_step``.
            batch_idx: As for ``training_step``.

        Raises:
            UnsupportedError: The module does not define the method.
        """
        del batch, batch_idx
        raise UnsupportedError(
            "A module with `JacobianDescent` has no `training_losses(self, batch, batch_idx)`. "
            "Write it in place of `training_step`, and return the losses of the samples."
        )

    def make_engine(self) -> Engine:
        """Makes the engine, once for each fit. Override it for other options, or other modules.

        With several processes, as by ``strategy="ddp"``, the objectives of all have one Gramian.
        """
        return Engine(self, distributed=self.trainer.world_size > 1)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """A batch; and a step of all optimizers, where it is the last one of a step.

        Returns:
            The mean of the losses as ``"loss"``, for callbacks; and the ``"weights"`` of each batch
            of the step, ``None`` before its last one.
        """
        if self._micro_batches is None:
            weighting = getattr(self, "weighting", None)
            if weighting is None:
                raise InvalidOptionError(
                    f"{type(self).__name__} has no `weighting`. Set `self.weighting` to a function "
                    "of a Gramian in `__init__`, for instance `autogram.weightings.UPGrad()`."
                )
            count_of("micro_batches", self.micro_batches)
            self._micro_batches = MicroBatches(self.make_engine(), weighting)
        losses = self.training_losses(batch, batch_idx)
        is_last = (batch_idx + 1) % self.micro_batches == 0 or self.trainer.is_last_batch
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if is_last:
            # A step runs inside of the forward pass of DistributedDataParallel, whose hooks would
            # not exchange gradients yet. Other strategies have nothing to do here.
            self.trainer.strategy.pre_backward(parts_of(losses)[0])
        weights = self._micro_batches.add(losses, is_last=is_last, scaler=scaler)
        if weights is not None:
            optimizers = self.optimizers()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
                optimizer.zero_grad()
        parts = [part.detach().float().flatten() for part in parts_of(losses)]
        return {"loss": torch.cat(parts).mean(), "weights": weights}

    def on_fit_start(self) -> None:
        """Takes off what a fit has left that ended by an error."""
        super().on_fit_start()
        self._take_off()

    def on_fit_end(self) -> None:
        """Takes the engine off."""
        super().on_fit_end()
        self._take_off()

    def _take_off(self) -> None:
        """Forgets a step that is not complete, and takes the engine off."""
        if self._micro_batches is not None:
            self._micro_batches.close()
            self._micro_batches = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_micro_batches": None}  # a copy has no engine on it
