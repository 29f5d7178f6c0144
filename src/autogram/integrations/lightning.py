"""For Lightning: a mixin for modules whose steps are Jacobian descent.

Needs lightning or pytorch-lightning, whose modules the mixin is for; it imports neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autogram import Engine, InvalidOptionError, UnsupportedError
from autogram._engine.steps import GradientsOutside
from autogram._losses import Losses, parts_of
from autogram._weights import Weighting
from autogram.integrations._micro_batches import MicroBatches

__all__ = ["JacobianDescent"]

# The base of the mixin's users, without installing Lightning for the types.
_Module: Any = object


class JacobianDescent(_Module):  # type: ignore[misc]  # the methods of a `LightningModule`
    """A mixin for a ``LightningModule``, through its hook ``backward``.

    The module has a ``weighting``, as for :meth:`autogram.Engine.backward`, and computes losses in
    ``training_losses`` instead of one loss in ``training_step``. Everything else is Lightning's
    automatic optimization: schedulers, clipping, precision plugins, loggers, progress bars,
    callbacks and checkpoints. With ``accumulate_grad_batches``, all objectives of a step have one
    Gramian, and gradients are in ``.grad`` after the last batch of a step, not before.

    A module that overrides ``on_fit_start`` or ``on_fit_end`` calls the method of ``super()``.

    Attributes:
        weighting: Maps the Gramian of all objectives of a step to their weights.
        gradients_outside: As for :meth:`autogram.Engine.backward`.
        objective_weights: The weights of each batch of the step, in the form of its losses, after
            the backward pass of the last batch; ``None`` after the others.

    Example:
        `docs/trainers.md` shows a training.
    """

    weighting: Weighting
    gradients_outside: GradientsOutside = "sum"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses modules whose own methods would be called instead of the mixin's."""
        super().__init_subclass__(**kwargs)
        for name, instead in _OURS.items():
            if getattr(cls, name) is not getattr(JacobianDescent, name):
                raise UnsupportedError(
                    f"{cls.__name__} overrides `{name}` of `JacobianDescent`, so "
                    "nothing would be weighted. Make `JacobianDescent` the first of the bases, and "
                    f"{instead}."
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.objective_weights: list[Any] | None = None
        self._micro_batches: MicroBatches | None = None
        self._objectives: Losses | None = None  # from `training_step` to `backward`

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
            "Write it instead of `training_step`, and return the losses of the samples."
        )

    def make_engine(self) -> Engine:
        """Makes the engine, once for each fit. Override it for other options, or other modules.

        With several processes, as with ``strategy="ddp"``, all objectives share one Gramian.
        """
        return Engine(self, distributed=self.trainer.world_size > 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean of the losses, which Lightning reports.

        Lightning scales it, and passes it to :meth:`JacobianDescent.backward`.

        Raises:
            InvalidOptionError: There is no weighting, or ``micro_batches`` of earlier versions.
            UnsupportedError: Lightning would not call :meth:`backward`.
        """
        if self._micro_batches is None:
            weighting = self._checked_weighting()
            outside = self.gradients_outside
            self._micro_batches = MicroBatches(self.make_engine(), weighting, outside)
        losses = self._objectives = self.training_losses(batch, batch_idx)
        return torch.cat([part.float().flatten() for part in parts_of(losses)]).mean()

    def backward(self, loss: Tensor) -> None:
        """Adds the losses of a batch, and computes gradients when Lightning takes a step.

        Args:
            loss: The mean of the losses, divided and scaled by Lightning. It is not
                used, because the weights cover all objectives, and the engine uses the scaler.

        Raises:
            AutogramError: As for :meth:`autogram.Engine.backward`.
        """
        del loss
        losses, self._objectives = self._objectives, None
        assert losses is not None  # `training_step` comes first
        assert self._micro_batches is not None
        self.objective_weights = self._micro_batches.add(
            losses,
            # As Lightning itself does: no public name tells it for all kinds of loaders.
            is_last=not self.trainer.fit_loop._should_accumulate(),
            scaler=getattr(self.trainer.precision_plugin, "scaler", None),
        )

    def _checked_weighting(self) -> Weighting:
        """The weighting, if the module and its trainer will call it."""
        weighting: Weighting | None = getattr(self, "weighting", None)
        name = type(self).__name__
        if weighting is None:
            raise InvalidOptionError(
                f"{name} has no `weighting`. Set `self.weighting` to a function of a Gramian in "
                "`__init__`, for instance `autogram.weightings.UPGrad()`."
            )
        if hasattr(self, "micro_batches"):
            raise InvalidOptionError(
                f"{name} has `micro_batches`, which is no longer used. Remove it, and pass "
                "`accumulate_grad_batches` to the `Trainer`."
            )
        if not self.automatic_optimization:
            raise UnsupportedError(
                f"{name} has `automatic_optimization = False`, so Lightning would not call the "
                "optimizer. Remove it: `JacobianDescent` needs automatic optimization. Instead "
                "of several optimizers, return one with several groups of parameters."
            )
        strategy = self.trainer.strategy
        if strategy.handles_gradient_accumulation:
            raise UnsupportedError(
                f"{type(strategy).__name__} makes backward passes itself, without calling "
                "`LightningModule.backward`, and does not know the weights. Use another strategy, "
                'for instance "ddp".'
            )
        return weighting

    def on_fit_start(self) -> None:
        """Removes the engine of a fit that ended with an error."""
        super().on_fit_start()
        self._take_off()

    def on_fit_end(self) -> None:
        """Removes the engine."""
        super().on_fit_end()
        self._take_off()

    def _take_off(self) -> None:
        """Forgets an incomplete step, and removes the engine."""
        if self._micro_batches is not None:
            self._micro_batches.close()
        self._micro_batches = self._objectives = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        # A copy has no engine on it, and no graph.
        return {**state, "_micro_batches": None, "_objectives": None}


# Methods of the mixin, and the alternative to overriding them.
_OURS = {
    "training_step": "write `training_losses(self, batch, batch_idx)`, which returns the losses",
    "backward": "use Lightning's hooks `on_before_backward` and `on_after_backward`",
}
