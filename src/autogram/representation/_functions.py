"""The Gramian of losses with respect to a representation, and steps with weights from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autogram._arguments import check_losses, dim_of, is_retained
from autogram._capture.autograd.graph import explaining_freed_graphs, nodes_from
from autogram._capture.samples.objectives import Objectives
from autogram._engine.steps import GradientsOutside, check_outside
from autogram._losses import L, Losses, as_one_tensor, weights_like
from autogram._undo import undoing
from autogram._weights import Weighting, check_finite, check_weighting, weights_by, weights_of
from autogram.errors import InvalidBatchDimError, InvalidOperandError, UnsupportedError, listed
from autogram.representation._rows import RowsAtTensors


@undoing
def compute_gramian(
    losses: Losses, representation: Tensor | Sequence[Tensor], *, batch_dim: int | None = None
) -> Tensor:
    """The Gramian of the Jacobian of the losses with respect to a representation.

    The Jacobian is taken with respect to a tensor of the forward pass, such as the trunk's output
    in a multi-task model, instead of parameters. No engine is needed. The passes end
    at the representation, so the trunk costs nothing.

    Args:
        losses: The objectives, as for :meth:`autogram.Engine.compute_gramian`: a tensor with m
            elements, or a list or a dict of such tensors. Their graph is kept.
        representation: The tensor that the heads read, or several independent ones,
            with gradients enabled. It may be a leaf.
        batch_dim: The dimension of the losses that counts B samples, each of which reads its own
            elements of the representation. ``None`` is correct for any losses.

    Returns:
        All inner products of the losses' gradients, ``(m, m)``, in the row-major order of the
        losses, in the dtype of the representation and at least float32, detached. With a
        ``batch_dim``, products of different samples are zero.

        Cost: a backward pass from each loss to the representation, through its own head if the
        losses are single numbers in a list, a dict or a `torch.stack`; with a ``batch_dim``, one
        for all samples together, for each of the K losses of a sample, and a walk through the graph
        that infers where samples are. RAM: m or K gradients of the representation.

    Raises:
        InvalidOperandError: The representation is not a tensor, requires no gradient, or depends on
            another one.
        NotConnectedError: The losses do not depend on the representation.
        InvalidLossesError: The losses are not floating-point, or have no graph.
        InvalidBatchDimError: ``batch_dim`` is not a dimension of the losses.
        MixedSamplesError: With ``batch_dim``, samples meet between representation and losses.
        UnsupportedError: With ``batch_dim``, there is a nested tensor between them.
        FreedGraphError: An earlier backward pass has freed the graph.

    References:
        Sener and Koltun 2018, arXiv:1810.04650, section 3.3 (MGDA-UB).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram import representation
        >>> trunk, heads = nn.Linear(3, 4), [nn.Linear(4, 1), nn.Linear(4, 2)]
        >>> hidden = trunk(torch.randn(5, 3))
        >>> losses = [head(hidden).square().mean() for head in heads]
        >>> representation.compute_gramian(losses, hidden).shape
        torch.Size([2, 2])
    """
    tensors = _tensors_of(representation)
    objectives = _objectives_of(losses, batch_dim)
    return RowsAtTensors(objectives, tensors, retain_graph=True).gramian()


@overload
def backward(
    losses: L,
    representation: Tensor | Sequence[Tensor],
    weighting: Weighting,
    *,
    batch_dim: int | None = ...,
    gradients_outside: GradientsOutside = ...,
    retain_graph: bool = ...,
    return_gramian: Literal[False] = ...,
) -> L: ...


@overload
def backward(
    losses: L,
    representation: Tensor | Sequence[Tensor],
    weighting: Weighting,
    *,
    batch_dim: int | None = ...,
    gradients_outside: GradientsOutside = ...,
    retain_graph: bool = ...,
    return_gramian: Literal[True],
) -> tuple[L, Tensor]: ...


@undoing
def backward(
    losses: Losses,
    representation: Tensor | Sequence[Tensor],
    weighting: Weighting,
    *,
    batch_dim: int | None = None,
    gradients_outside: GradientsOutside = "sum",
    retain_graph: bool = False,
    return_gramian: bool = False,
) -> Losses | tuple[Losses, Tensor]:
    """A step's whole backward pass, with weights from the Gramian of :func:`compute_gramian`.

    One ordinary pass takes the weighted gradient of the representation back through the trunk,
    whatever the number of losses. The parameters of the trunk get the same gradients as with
    ``losses.backward(weights)``. Hooks on the representation and on parameters run once. Hooks
    between the representation and the losses run in the pass of each loss.

    Args:
        losses: As for :func:`compute_gramian`.
        representation: As for :func:`compute_gramian`.
        weighting: As for :meth:`autogram.Engine.backward`: maps the Gramian ``(m, m)`` to weights.
        batch_dim: As for :func:`compute_gramian`.
        gradients_outside: The gradient of leaves on which the losses depend directly,
            such as parameters of heads: ``"sum"``, that of the sum of all losses, so that each head
            gets that of its own task, without a further pass; or ``"weighted"``, that of the
            weighted losses, with one more pass through the heads.
        retain_graph: Whether to keep the graph.
        return_gramian: Whether to return the Gramian as well.

    Returns:
        The weights in the losses' shape, or in a list or a dict like the losses; and the
        Gramian ``(m, m)`` if requested; detached.

        Cost: that of :func:`compute_gramian`, and a backward pass through the trunk. It waits once
        for a GPU, to check whether the weights are finite.

    Raises:
        InvalidOperandError: As for :func:`compute_gramian`; or the weights have another shape, or
            the weighting is not a function of a Gramian.
        InvalidOptionError: An option has an invalid value.
        NonFiniteError: The weights are not finite, and nothing is added to ``.grad``.
        UnsupportedError: With ``"sum"``, the losses depend on a leaf both through the
            representation and around it.
        AutogramError: As for :func:`compute_gramian`.

    References:
        Sener and Koltun 2018, arXiv:1810.04650, algorithm 2 and section 3.3 (MGDA-UB).
    """
    check_weighting(weighting)
    check_outside(gradients_outside)
    retain_graph = is_retained(retain_graph)
    tensors, objectives = _tensors_of(representation), _objectives_of(losses, batch_dim)
    total, is_sum = objectives.losses, gradients_outside == "sum"
    leaves = _leaves_past(total, tensors) if is_sum else []
    rows = RowsAtTensors(objectives, tensors, leaves, retain_graph=retain_graph or not is_sum)
    gramian = rows.gramian()
    weights = weights_by(weighting, gramian)
    by_sample = weights_of(weights, objectives)
    check_finite(weights, gramian.dtype, gramian)
    if total.numel():
        roots, cotangents = [total], [weights.reshape(total.shape).to(total)]
        if is_sum:
            roots = [*tensors, *rows.sums]
            cotangents = [*rows.weighted_sums(by_sample), *rows.sums.values()]
        with explaining_freed_graphs(total):
            torch.autograd.backward(roots, cotangents, retain_graph=retain_graph)
    in_form: Any = weights_like(weights, losses, batch_dim)
    return (in_form, gramian) if return_gramian else in_form


def _objectives_of(losses: Losses, batch_dim: int | None) -> Objectives:
    """Losses in one tensor, K for each sample."""
    dim = dim_of(batch_dim)
    if dim == "auto":
        raise InvalidBatchDimError(
            "`batch_dim` is 'auto', which works only with an engine. Pass the dimension of the "
            "losses that counts the samples, or `None` for any losses."
        )
    total = as_one_tensor(losses, dim, set())
    check_losses(total, dim, set())
    return Objectives(total, dim if total.dim() else None)


def _tensors_of(representation: Any) -> list[Tensor]:
    """The tensors of the representation, independent of each other."""
    several = [representation] if isinstance(representation, Tensor) else representation
    if not isinstance(several, list | tuple) or not several:
        raise InvalidOperandError(
            f"The representation is {'empty' if several == [] else f'a {type(several).__name__}'}. "
            "Pass the tensor that the heads read, or a list of several."
        )
    for tensor in several:
        if not isinstance(tensor, Tensor):
            raise InvalidOperandError(
                f"The representation contains a {type(tensor).__name__}. Pass only tensors."
            )
        if not tensor.requires_grad:
            raise InvalidOperandError(
                f"The representation of shape {tuple(tensor.shape)} requires no gradient: it was "
                "detached, or computed from frozen parameters alone or without gradients. Pass it "
                "undetached, or call `.requires_grad_()` on it before the heads read it."
            )
    tensors = list(dict.fromkeys(several))
    nodes = {get_gradient_edge(tensor).node for tensor in tensors}
    behind = nodes_from([child for node in nodes for child, _ in node.next_functions])
    if len(tensors) > 1 and not nodes.isdisjoint(behind):
        raise InvalidOperandError(
            "One tensor of the representation is computed from another, whose gradient would "
            "count twice. Pass only the tensors that the heads read."
        )
    return tensors


def _leaves_past(losses: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The leaves on which losses depend around some tensors, not through them."""
    edges = map(get_gradient_edge, tensors)
    ends: set[tuple[Any, int]] = {(edge.node, edge.output_nr) for edge in edges}
    seen: set[Any] = {None}
    pending: list[tuple[Any, int]] = [(losses.grad_fn, losses.output_nr)]
    past: list[Tensor] = []
    while pending:
        node, index = pending.pop()
        if node in seen or (node, index) in ends:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            past.append(leaf)
        pending += node.next_functions
    starts = [node for node, _ in ends]
    through = {getattr(node, "variable", None) for node in nodes_from(starts)}
    if both := [str(tuple(leaf.shape)) for leaf in past if leaf in through]:
        raise UnsupportedError(
            f"The losses depend on leaves of the shapes {listed(both)} through the representation "
            "and around it: these would get the gradients of weighted losses and of their sum. "
            'Pass a list of all tensors that the heads read, or `gradients_outside="weighted"`.'
        )
    return past
