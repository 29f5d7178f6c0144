"""For transformers: a ``Trainer`` whose steps are Jacobian descent.

Needs transformers and accelerate, which this file imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autogram import Engine, InvalidLossesError, UnsupportedError
from autogram._engine.steps import GradientsOutside
from autogram._extras import extra
from autogram._losses import Losses, parts_of
from autogram._weights import Weighting
from autogram.integrations._refused_arguments import refuse
from autogram.integrations._sample_losses import losses_by_function, losses_by_labels
from autogram.monitor import ConflictMonitor

with extra("transformers"):
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from autogram.integrations.accelerate import Accelerated, refuse_other_engines

__all__ = ["JacobianTrainer"]


class JacobianTrainer(Trainer):
    """A ``Trainer`` that weights the losses of samples, using their Gramian.

    Precision, gradient accumulation, clipping, schedules, logs, progress bars, evaluation and
    checkpoints are those of the base. With accumulation, all samples of a step share one Gramian.
    The engine is on the model while :meth:`train` runs.

    Args:
        args: As for the base.
        weighting: As for :meth:`autogram.Engine.backward`. If it is a
            :class:`autogram.monitor.ConflictMonitor`, its numbers are logged with each loss.
        gradients_outside: As for :meth:`autogram.Engine.backward`.
        kwargs: As for the base.

    Raises:
        UnsupportedError: An argument has a value that steps of an engine cannot follow.

    Example:
        `docs/trainers.md` shows a training.
    """

    loss_is_scaled_for_ga = False  # the base divides the mean of a batch for its log

    def __init__(
        self,
        *args: Any,
        weighting: Weighting,
        gradients_outside: GradientsOutside = "sum",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise UnsupportedError(
                "Use one process for each GPU (`torchrun`), or set CUDA_VISIBLE_DEVICES to one: "
                "`nn.DataParallel` copies the model in each step, and an engine does not see the "
                "copies."
            )
        self._weighting, self._outside = weighting, gradients_outside
        self._steps: Accelerated | None = None
        self._engine: Engine | None = None
        self._objectives: Losses | None = None  # from `compute_loss` to the backward pass
        self._is_compared = False  # losses of samples with the model's own loss

    def make_engine(self, model: nn.Module) -> Engine:
        """Makes the engine, once for each training. Override it for other options.

        With several processes, as with ``torchrun``, all objectives share one Gramian.

        Args:
            model: The model, without accelerate's wrappers.
        """
        return Engine(model, distributed=self.accelerator.num_processes > 1)

    def compute_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        """Computes the objectives of a batch. Override it for your own.

        These are the losses of samples from ``labels``: cross-entropy for classes, with
        ``label_smoothing_factor``; mean squares for numbers; and for tokens the mean over those
        with a label, of the next token in causal language models. The first batch of a training is
        compared with the model's own loss. With a ``compute_loss_func``, they are its results
        for each sample alone, with the number of its labels.

        Args:
            model: The model, with accelerate's wrappers.
            inputs: The inputs, on the model's device.

        Returns:
            ``(B,)``, or as for :meth:`autogram.Engine.compute_gramian` if it is overridden.

        Raises:
            InvalidLossesError: The outputs or labels have another form, or their loss differs.
        """
        inner = self.accelerator.unwrap_model(model)
        inner = getattr(inner, "get_base_model", lambda: inner)()  # without adapters of peft
        is_shifted = type(inner).__name__ in _CAUSAL or self._loss_shifts_labels
        labels = inputs.get("labels")
        if self.compute_loss_func is not None and (labels is None or isinstance(labels, Tensor)):
            outputs = model(**{name: x for name, x in inputs.items() if name != "labels"})
            function = self.compute_loss_func
            return losses_by_function(function, outputs, labels, is_shifted=is_shifted)
        outputs = model(**inputs)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
            raise InvalidLossesError(
                "The inputs have no tensor `labels`, or the outputs no tensor `logits`. Override "
                "`JacobianTrainer.compute_losses`, and return your own losses from it."
            )
        kind = getattr(getattr(inner, "config", None), "problem_type", None)
        options = {
            "is_shifted": is_shifted,
            "are_binary": kind == "multi_label_classification",
        }
        if not self._is_compared:
            self._is_compared = True
            plain, counts = losses_by_labels(logits.detach(), labels, smoothing=0.0, **options)
            _refuse_another_mean(outputs.get("loss"), (plain * counts).sum() / counts.sum())
        smoothing = 0.0 if self.label_smoother is None else self.label_smoother.epsilon
        return losses_by_labels(logits, labels, smoothing=smoothing, **options)[0]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """In evaluation, the base's loss; in training, the mean of the losses, without a graph."""
        if not (self.is_in_train and torch.is_grad_enabled()):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._steps is None:
            self._engine = self.make_engine(self.accelerator.unwrap_model(model))
            self._steps = Accelerated(
                self._engine,
                self._weighting,
                self.accelerator,
                gradients_outside=self._outside,
            )
        try:
            losses = self.compute_losses(model, inputs)
            parts = parts_of(losses)
        except BaseException:
            self._steps.forget()  # the base may begin anew, with smaller batches
            raise
        self._objectives = losses
        return torch.cat([part.detach().float().flatten() for part in parts]).mean()

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, like the base, with backward passes of the engine."""
        refuse(self.args)
        super().create_accelerator_and_postprocess()
        refuse_other_engines(self.accelerator)
        self.accelerator.backward = self._backward  # type: ignore[method-assign,assignment]  # ours

    def _backward(self, loss: Tensor) -> None:
        """Adds the losses of a batch; ``loss`` is their mean."""
        losses, self._objectives = self._objectives, None
        if losses is None or self._steps is None or loss.requires_grad:
            raise UnsupportedError(
                f"{type(self).__name__} overrides `compute_loss` or `training_step`, whose loss "
                "would not be weighted. Write `compute_losses(self, model, inputs)` instead, "
                "and return one loss for each sample."
            )
        self._steps.backward(losses)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs like the base, and adds a monitor's numbers to each training loss."""
        monitor = self._weighting
        if "loss" in logs and isinstance(monitor, ConflictMonitor) and monitor.history():
            logs = {**logs, **monitor.scalars()}
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains like the base, with an engine on the model."""
        self._is_compared = False
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._engine is not None:
                self._engine.remove()
            self._steps = self._engine = self._objectives = None


_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def _refuse_another_mean(own: Any, mean: Tensor) -> None:
    """Refuses losses of samples whose mean is not the model's own loss.

    Raises:
        InvalidLossesError: They do not agree.
    """
    if not isinstance(own, Tensor):
        return
    tolerance = max(torch.finfo(dtype).eps for dtype in (own.dtype, torch.float32)) ** 0.5
    own = own.detach().to(mean)
    if not torch.allclose(own, mean, rtol=tolerance, equal_nan=True):
        raise InvalidLossesError(
            f"The model's own loss is {float(own):.6g}, and the mean of the losses by labels and "
            f"logits is {float(mean):.6g}: it has another objective, or terms of all samples. "
            "Override `JacobianTrainer.compute_losses`, and return your own losses from it."
        )
