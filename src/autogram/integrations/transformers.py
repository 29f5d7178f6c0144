"""For transformers: a ``Trainer`` whose steps are Jacobian descent.

Needs transformers and accelerate, which this file imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, InvalidLossesError, UnsupportedError
from autogram._extras import extra
from autogram._losses import Losses, parts_of
from autogram._weights import Weighting

with extra("transformers"):
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from autogram.integrations.accelerate import Accelerated

__all__ = ["JacobianTrainer"]

_IGNORED = -100  # the label of tokens without a loss, in all of transformers


class JacobianTrainer(Trainer):
    """A ``Trainer`` that weighs the losses of samples by their Gramian.

    Precision, gradient accumulation, clipping, schedules, logs, progress bars, evaluation and
    checkpoints are those of the base. With accumulation, all samples of a step have one Gramian.
    The engine is on the model while :meth:`train` runs.

    Args:
        args: As for the base.
        weighting: As for :meth:`autogram.Engine.backward`.
        kwargs: As for the base.

    Example:
        `docs/trainers.md` has one that trains.
    """

    def __init__(self, *args: Any, weighting: Weighting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._weighting = weighting
        self._steps: Accelerated | None = None
        self._engine: Engine | None = None

    def make_engine(self, model: nn.Module) -> Engine:
        """Makes the engine, once for each call of :meth:`train`. Override it for other options.

        With several processes, as by ``torchrun``, the objectives of all have one Gramian.

        Args:
            model: Without the wrappers of accelerate.
        """
        return Engine(model, distributed=self.accelerator.num_processes > 1)

    def compute_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        """Computes the objectives of a batch. Override it for your own.

        These are the losses of samples by ``labels``: cross-entropy for classes, mean squares for
        numbers, and for tokens the mean over those with a label, of the next token in causal
        language models.

        Args:
            model: The model, with the wrappers of accelerate.
            inputs: The inputs, on the model's device.

        Returns:
            ``(B,)``, or as for :meth:`autogram.Engine.compute_gramian` if it is overridden.

        Raises:
            InvalidLossesError: The outputs or labels are others.
        """
        labels = inputs.get("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
            raise InvalidLossesError(
                "The inputs have no tensor `labels`, or the outputs no tensor `logits`. Return "
                "losses of your own from an override of `JacobianTrainer.compute_losses`."
            )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if labels.dtype.is_floating_point and logits.numel() == labels.numel():
            return (logits - labels.view_as(logits)).square().flatten(1).mean(1)
        if labels.dim() == 2 and logits.dim() == 3:
            if type(self.accelerator.unwrap_model(model)).__name__ in _CAUSAL:
                logits, labels = logits[:, :-1], labels[:, 1:]
            return _of_tokens(logits, labels)
        if labels.dim() == 1 and logits.dim() == 2 and not labels.dtype.is_floating_point:
            return F.cross_entropy(logits, labels, reduction="none")
        raise InvalidLossesError(
            f"There are logits of shape {tuple(logits.shape)} and labels of shape "
            f"{tuple(labels.shape)} and dtype {labels.dtype}. Return losses of your own from an "
            "override of `JacobianTrainer.compute_losses`."
        )

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """A micro-batch, as the base asks for it; returns its part of the mean loss."""
        del num_items_in_batch  # the weights are of samples, whatever their number of tokens is
        if self.args.n_gpu > 1:
            raise UnsupportedError(
                "`nn.DataParallel` copies the model in each step, which an engine does not follow. "
                "Use one process for each GPU (`torchrun`), or set CUDA_VISIBLE_DEVICES to one."
            )
        if self._steps is None:
            self._engine = self.make_engine(self.accelerator.unwrap_model(model))
            self._steps = Accelerated(self._engine, self._weighting, self.accelerator)
        model.train()
        set_mode = getattr(self.optimizer, "train", None)
        if callable(set_mode):  # optimizers without a schedule have two modes, too
            set_mode()
        try:
            with self.compute_loss_context_manager():
                losses = self.compute_losses(model, self._prepare_inputs(inputs))
        except BaseException:
            self._steps.forget()  # the base may begin anew, with smaller batches
            raise
        mean = torch.cat([part.detach().float().flatten() for part in parts_of(losses)]).mean()
        self._steps.backward(losses)
        return mean / self.current_gradient_accumulation_steps

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, as the base does, with an engine on the model."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._engine is not None:
                self._engine.remove()
            self._steps = self._engine = None


_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def _of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of the tokens of each sample that have a label, ``(B,)``."""
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=_IGNORED
    )
    has_label = labels != _IGNORED
    return losses.view_as(labels).sum(1) / has_label.sum(1).clamp(min=1)
