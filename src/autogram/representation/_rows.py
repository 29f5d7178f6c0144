"""Rows of the Jacobian with respect to tensors of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autogram._capture.autograd.exact import exact, without_autocast
from autogram._capture.autograd.grad import at_least_single
from autogram._capture.autograd.graph import in_dense, kind_of_node
from autogram._capture.autograd.passes import Pass
from autogram._capture.backward.verification import without_hooks
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._undo import undone
from autogram.errors import NotConnectedError
from autogram.representation._samples import owners_of


class RowsAtTensors:
    """The gradients of all losses with respect to some tensors.

    There are K rows, each for all samples side by side: every element belongs to one
    sample. If the batch is one sample, there is a row for each loss.

    Args:
        objectives: K losses for each of B samples.
        tensors: Tensors of the forward pass, independent of each other.
        leaves: Leaves on which the losses depend around the tensors, for their gradients.
        retain_graph: Whether the graph between the tensors and the losses is needed later.

    Raises:
        MixedSamplesError: Samples meet between the tensors and the losses.
        NotConnectedError: No loss depends on one of the tensors.
    """

    def __init__(
        self,
        objectives: Objectives,
        tensors: Sequence[Tensor],
        leaves: Sequence[Tensor] = (),
        *,
        retain_graph: bool,
    ) -> None:
        self._objectives = objectives
        self._owners = owners_of(objectives, tensors)
        k = objectives.per_sample
        self._rows = [torch.zeros((k, *x.shape), dtype=x.dtype, device=x.device) for x in tensors]
        self.sums: dict[Tensor, Tensor] = {}
        """The gradients of the sum of all losses, for leaves on which it depends."""
        reached = [False] * len(tensors)
        numbers = iter(range(k))

        def take(gradients: tuple[Tensor | None, ...]) -> None:
            number = next(numbers)
            for i, rows in enumerate(self._rows):
                if (gradient := gradients[i]) is not None:
                    rows[number] = in_dense(gradient)
                    reached[i] = True
            for leaf, gradient in zip(leaves, gradients[len(tensors) :], strict=True):
                if gradient is not None:
                    total = self.sums.get(leaf)
                    gradient = in_dense(gradient)
                    self.sums[leaf] = gradient if total is None else total + gradient

        losses, inputs = objectives.losses, [*tensors, *leaves]
        outputs = list(_outputs(objectives)) if losses.numel() else []
        ends = [retain_graph or i < len(outputs) for i in range(1, len(outputs) + 1)]
        passes = [(*output, end) for output, end in zip(outputs, ends, strict=True)]
        retained = [(x, x.grad) for x in tensors if x.retains_grad]
        with (
            undone(partial(_put_back, retained)),
            without_hooks(inputs),
            without_autocast(losses.device),
            torch.no_grad(),
        ):
            Pass(Channel(), is_step=True).differentiate_each(passes, inputs, take)
        if missing := [i for i, is_reached in enumerate(reached) if not is_reached and passes]:
            shape = tuple(tensors[missing[0]].shape)
            raise NotConnectedError(
                f"The losses do not depend on the representation of shape {shape}. Pass the "
                "tensor itself that the heads read, not a copy or another view of it, and not its "
                "value before a change in place."
            )

    def gramian(self) -> Tensor:
        """J Jᵀ, ``(m, m)``, in the order of the losses."""
        objectives = self._objectives
        k, b, device = objectives.per_sample, objectives.samples, objectives.losses.device
        with exact(device):
            dtype = reduce(torch.promote_types, [_real(rows) for rows in self._rows])
            total = torch.zeros(k, k, b, dtype=dtype, device=device)
            for rows, owners in zip(self._rows, self._owners, strict=True):
                rows = rows.to(at_least_single(rows.dtype))
                total += _products(rows, owners, b).to(device)
            gramian = torch.zeros(k * b, k * b, dtype=dtype, device=device)
            numbers = objectives.numbers(device=device)  # (k, b)
            gramian[numbers.unsqueeze(1), numbers.unsqueeze(0)] = total
            return gramian

    def weighted_sums(self, weights: Tensor) -> list[Tensor]:
        """Jᵀ w for each tensor, for weights ``(k, b)``."""
        sums = []
        with exact(weights.device):
            for rows, owners in zip(self._rows, self._owners, strict=True):
                wide = at_least_single(rows.dtype)
                each = weights.to(rows.device, _real(rows))[:, owners]
                sums.append((rows.to(wide) * each).sum(0).to(rows.dtype))
        return sums


def _outputs(objectives: Objectives) -> Iterator[tuple[Tensor | GradientEdge, Tensor]]:
    """The tensor to differentiate for each row, and its cotangent.

    If losses of the whole batch were joined from single losses, it is the single loss:
    otherwise, zeros for the others would pass through their heads.
    """
    losses = objectives.losses
    node, m = losses.grad_fn, losses.numel()
    are_joined = kind_of_node(node.__class__).operation in ("Cat", "Stack") and losses.dim() == 1
    is_seen = bool(losses._backward_hooks) or losses.retains_grad
    singles = node.next_functions if node is not None and are_joined and not is_seen else ()
    if objectives.samples > 1 or len(singles) != m:
        singles = ((None, 0),) * objectives.per_sample
    for (start, index), cotangent in zip(singles, objectives.cotangents(), strict=True):
        if start is None:
            yield losses, cotangent
        else:
            like = start._input_metadata[index]
            one = torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)
            yield GradientEdge(start, index), one


def _put_back(retained: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Restores the retained gradients of tensors."""
    for tensor, gradient in retained:
        tensor.grad = gradient


def _products(rows: Tensor, owners: Tensor, samples: int) -> Tensor:
    """Inner products of rows ``(k, *shape)`` for each sample, ``(k, k, b)``.

    Those of different samples are zero: no element belongs to two samples.
    """
    k = len(rows)
    if samples == 1:
        flat = rows.reshape(k, prod(rows.shape[1:]))
        return (flat @ flat.mH).real.unsqueeze(2)
    total = torch.zeros(k, k, samples, dtype=_real(rows), device=rows.device)
    for i in range(k):
        products = (rows[i] * rows[i:].conj()).real.sum_to_size((k - i, *owners.shape))
        total[i, i:].index_add_(1, owners.flatten(), products.flatten(1))
        total[i + 1 :, i] = total[i, i + 1 :]
    return total


def _real(rows: Tensor) -> torch.dtype:
    """The dtype of inner products of some rows."""
    return at_least_single(rows.dtype.to_real())
