"""Losses of samples from the output of a transformers model for a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from autogram import InvalidLossesError

IGNORED = -100  # the label of tokens without a loss, in all of transformers


def losses_by_function(
    function: Callable[..., Any], outputs: Any, labels: Tensor | None, *, is_shifted: bool
) -> Tensor:
    """The results of a ``compute_loss_func`` for each sample alone, ``(B,)``.

    Args:
        function: A function of outputs, labels and the number of labels, as in transformers.
        outputs: The outputs of the model. Tensors whose first dimension has size B are split.
        labels: The labels of B samples, or ``None``.
        is_shifted: Whether a label belongs to the token before it, so that the first has no loss.

    Raises:
        InvalidLossesError: The function returns several numbers for a sample.
    """
    leaves, form = tree_flatten((outputs, labels))
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim()]
    size = len(tensors[0] if labels is None else labels)
    split = [
        x.split(1) if isinstance(x, Tensor) and x.dim() and len(x) == size else [x] * size
        for x in leaves
    ]
    losses = []
    for parts in zip(*split, strict=True):
        output, label = tree_unflatten(parts, form)
        count = None if label is None else (label[..., 1:] if is_shifted else label).ne(IGNORED)
        loss = function(
            output, label, num_items_in_batch=None if count is None else count.sum().clamp(min=1)
        )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidLossesError(
                f"`compute_loss_func` is called for each sample, and returns {what} instead of "
                "one number. Return a mean or a sum from it, or override "
                "`JacobianTrainer.compute_losses`."
            )
        losses.append(loss.reshape(()))
    return torch.stack(losses)


def losses_by_labels(
    logits: Tensor, labels: Tensor, *, is_shifted: bool, are_binary: bool, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Losses of samples ``(B,)``, and the number of values or labels that each loss averages.

    Args:
        logits: ``(B, C)`` for classes, ``(B, T, C)`` for tokens, or numbers.
        labels: ``(B,)`` or ``(B, T)`` of integers, or numbers of the form of the logits.
        is_shifted: Whether a label belongs to the token before it, so that the first has no loss.
        are_binary: Whether each number in the labels distinguishes two classes.
        smoothing: The share of the loss that all classes get equally.

    Raises:
        InvalidLossesError: The labels have another form, or are numbers that cannot be smoothed.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if labels.dtype.is_floating_point and logits.numel() == labels.numel() and not smoothing:
        labels = labels.view_as(logits).to(logits)
        if are_binary:
            losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        else:
            losses = (logits - labels).square()
        losses = losses.flatten(1)
        return losses.mean(1), losses.new_full((len(losses),), losses[0].numel())
    if logits.shape[:-1] != labels.shape or labels.dim() > 2 or labels.dtype.is_floating_point:
        raise InvalidLossesError(
            f"There are logits of shape {tuple(logits.shape)} and labels of shape "
            f"{tuple(labels.shape)} and dtype {labels.dtype}, and `label_smoothing_factor` is "
            f"{smoothing}. Override `JacobianTrainer.compute_losses`, and return your own "
            "losses from it."
        )
    if is_shifted and labels.dim() == 2:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )
    counts = labels.ne(IGNORED).unsqueeze(-1).flatten(1).sum(1)
    return losses.view_as(labels).unsqueeze(-1).flatten(1).sum(1) / counts.clamp(min=1), counts
