"""Clipping: the sum of the samples' gradients, each scaled down to a norm of at most a bound."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan
from typing import Any, overload

from torch import Tensor

from autogram._arguments import Grouping, is_number, is_retained
from autogram._capture.backward.run import Run
from autogram._capture.distribution import is_exchanged, refuse_gradients
from autogram._engine.hooked import Hooked
from autogram._jacobian import Jacobian, JacobianPart, check_groups, groups_of
from autogram._weights import check_norms
from autogram.errors import (
    InvalidBatchDimError,
    InvalidLossesError,
    InvalidOperandError,
    MixedSamplesError,
    UnsupportedError,
    listed,
)


class Clipping(Hooked):
    """An engine's hooks, with clipping sample by sample."""

    @overload
    def clip(self, losses: Tensor, bound: float, *, retain_graph: bool = ...) -> Tensor: ...

    @overload
    def clip(
        self,
        losses: Tensor,
        bound: Mapping[str, float],
        by: Grouping | None = ...,
        *,
        retain_graph: bool = ...,
    ) -> dict[str, Tensor]: ...

    def clip(
        self,
        losses: Tensor,
        bound: float | Mapping[str, float],
        by: Grouping | None = None,
        *,
        retain_graph: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Adds the sum of the samples' gradients, each clipped to a norm, into ``.grad``.

        The gradient g of each sample counts as g · min(1, C / ‖g‖), so adding or removing a sample
        changes the sum by at most C: the scale of the noise in DP-SGD. Calls add up, like those of
        ``.backward``, also over micro-batches. Noise is not added. An error leaves ``.grad``
        unchanged.

        Args:
            losses: One loss for each sample, with B elements, as for
                :meth:`autogram.Engine.compute_gramian`, and not divided by B.
            bound: C, the largest norm of a sample's gradient with respect to all parameters. Or a
                dict of bounds for groups of parameters, each clipped by its own norm; the sum then
                changes by at most the root of the sum of all squared bounds.
            by: The groups of such a dict, as for :meth:`autogram.Jacobian.block_gramians`. By
                default, each parameter is its own group, by name.
            retain_graph: Whether to keep the graph, as for :meth:`autogram.Engine.backward`.

        Returns:
            The norms before clipping, ``(B,)``, or a dict of them by group; at least float32.

            Cost: a backward pass through the activations, norms of the rows, which are linear in B,
            and weighted gradients. RAM: the cotangents of all activations.

        Raises:
            InvalidLossesError: There are several losses for a sample, or one for the whole batch.
            InvalidBatchDimError: The engine has ``batch_dim=None``, which does not tell samples
                apart.
            MixedSamplesError: Samples meet, so clipping cannot bound the influence of a sample.
            InvalidOperandError: A bound is not positive, or the dict lacks a group or has others.
            NonFiniteError: A norm is not finite. On a GPU, a later call raises it.
            UnsupportedError: The losses depend on leaves outside J that require a gradient,
                which would not be clipped; or several processes share the gradients.
            AutogramError: As for :meth:`autogram.Engine.compute_gramian`.

        References:
            Abadi et al. 2016, arXiv:1607.00133 (DP-SGD); Li et al. 2021, arXiv:2110.05679 (norms
            without gradients); Bu et al. 2022, arXiv:2210.00038 (one pass for norms and sum).

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from autogram import Engine
            >>> model = nn.Linear(3, 1)
            >>> engine = Engine(model, batch_dim=0)
            >>> losses = model(torch.randn(5, 3)).square().squeeze(1)
            >>> engine.clip(losses, 1.0).shape
            torch.Size([5])
        """
        retain_graph = is_retained(retain_graph)
        bounds = _bounds_of(bound, by)
        total = self._checked(losses)
        self._check_clippable(total)
        # If norms cost less from rows than from factors, the rows are not larger than the
        # factors, and are kept for the sum.
        run = self._drivers.run(
            total, form="auto", is_step=True, retain_graph=retain_graph, is_summed=False
        )
        if not retain_graph:
            for recording in (*run.survey.recordings, *run.survey.passes):
                recording.freed_by = "`engine.clip`"
        _check_run(run)
        names = run.names
        jacobian = Jacobian([JacobianPart.of(run, names)], names, self._limit, self._finite)
        if isinstance(bounds, float):
            norms = jacobian.row_norms()
            jacobian.accumulate_grad(_weights(norms, bounds))
            return norms
        check_groups("bounds", bounds, groups_of(by, names))
        norms_by_group = jacobian.row_norms(by or _itself)
        each = norms_by_group.items()
        weights = {name: _weights(norms, bounds[name]) for name, norms in each}
        jacobian.accumulate_grad(weights, by)
        return norms_by_group

    def _check_clippable(self, losses: Tensor) -> None:
        """Refuses losses whose samples are not apart, and steps that several processes share."""
        if self._ranks is not None:
            raise UnsupportedError(
                "`engine.clip` clips the samples of one process, and the engine covers several "
                "processes. Make an engine without `distributed` on each of them. Call `clip` "
                "inside `model.no_sync()`, and add up `.grad` with `torch.distributed.all_reduce`."
            )
        if is_exchanged(self._channel, losses):
            refuse_gradients("engine.clip")
        dim, shape = self._batch_dim, tuple(losses.shape)
        if dim is None:
            raise InvalidBatchDimError(
                "`batch_dim` is None, so the engine does not tell samples apart, and cannot "
                "bound the influence of a sample. Pass `batch_dim=0` to `Engine`."
            )
        if not shape:
            raise InvalidLossesError(
                "The losses are one number: the gradient of the whole batch would be clipped. "
                "Keep one loss for each sample: `reduction='none'`, no `.mean()`."
            )
        samples = shape[0 if dim == "auto" else dim]
        if samples and losses.numel() != samples:
            raise InvalidLossesError(
                f"The losses have shape {shape}: {losses.numel() // samples} for each of {samples} "
                "samples. Clipped one by one, they would let a sample count several times. Pass "
                "the sum of the losses of each sample, `losses.flatten(1).sum(1)`. To clip each "
                "loss anyway, use `row_norms` and `accumulate_grad` of `engine.jacobian(losses)`."
            )


def _check_run(run: Run) -> None:
    """Refuses samples that meet, and gradients that would not be clipped."""
    are_apart = run.layouts is not None or run.is_misled  # if misled, the next call decides
    if not are_apart and run.survey.losses.numel() > 1:
        raise MixedSamplesError(
            "The samples meet, as in BatchNorm in training mode: each loss depends on several "
            "samples, and clipping would not bound the influence of any sample. Nothing was added "
            "to `.grad`. Call `.eval()` on such layers, or replace them, for instance by "
            "`nn.GroupNorm`. With `Engine(model, batch_dim=0)`, the error names the layer."
        )
    others = [x for x in run.survey.outside if x.requires_grad] if run.survey.losses.numel() else []
    if others:
        shapes = listed([str(tuple(x.shape)) for x in others])
        raise UnsupportedError(
            f"The losses depend on leaves that require a gradient and are not among the engine's "
            f"parameters, of the shapes {shapes}. Their gradients would not be clipped. Pass the "
            "modules that have them to `Engine`, too, or call `x.requires_grad_(False)` or "
            "`x.detach()` before the forward pass."
        )


def _bounds_of(bound: Any, by: Grouping | None) -> float | dict[str, float]:
    """The bounds as numbers."""
    if isinstance(bound, Mapping):
        return {name: _bound_of(each) for name, each in bound.items()}
    if by is not None:
        raise InvalidOperandError(
            "Groups of parameters are given, but only one bound. Pass a dict with a bound for each "
            "group, or leave out `by` to clip the whole gradient."
        )
    return _bound_of(bound)


def _bound_of(bound: Any) -> float:
    """A bound as a number."""
    is_single = isinstance(bound, Tensor) and bound.numel() == 1 and not bound.is_complex()
    if not (is_number(bound) or is_single) or not 0 < bound < inf:
        raise InvalidOperandError(
            f"A bound of norms is {bound!r}. Pass a positive number, or a dict of them by group."
        )
    return float(bound)


def _weights(norms: Tensor, bound: float) -> Tensor:
    """The factors of rows with some norms."""
    check_norms(norms)
    # On a GPU, this is read later: zero times infinity would not help.
    return (bound / norms.clamp(min=bound)).masked_fill(~norms.isfinite(), nan)


def _itself(name: str) -> str:
    """Each parameter as a group."""
    return name
