"""Steps of an engine: from losses to gradients in ``.grad``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal, overload

from torch import Tensor
from torch.amp import GradScaler

from autogram._arguments import check_keep
from autogram._blocks import Keep
from autogram._engine.accumulation import Accumulation
from autogram._engine.hooked import Hooked
from autogram._engine.scale import Scale
from autogram._engine.steps import GradientsOutside, Step, check_outside
from autogram._losses import L, Losses
from autogram._undo import undoing
from autogram._weights import Weighting


class Training(Hooked):
    """An engine's modules, and steps that train them, of one batch or of many micro-batches."""

    @overload
    def backward(
        self,
        losses: L,
        weighting: Weighting,
        *,
        scaler: GradScaler | None = ...,
        gradients_outside: GradientsOutside = ...,
        retain_graph: bool = ...,
        return_gramian: Literal[False] = ...,
    ) -> L: ...

    @overload
    def backward(
        self,
        losses: L,
        weighting: Weighting,
        *,
        scaler: GradScaler | None = ...,
        gradients_outside: GradientsOutside = ...,
        retain_graph: bool = ...,
        return_gramian: Literal[True],
    ) -> tuple[L, Tensor]: ...

    @undoing
    def backward(
        self,
        losses: Losses,
        weighting: Weighting,
        *,
        scaler: GradScaler | None = None,
        gradients_outside: GradientsOutside = "sum",
        retain_graph: bool = False,
        return_gramian: bool = False,
    ) -> Losses | tuple[Losses, Tensor]:
        """A step's whole backward pass: Gramian, weights, and Jᵀ w added into ``.grad``.

        Parameters of J get the gradients of ``losses.backward(weights)``, to rounding, with the
        weights ``weighting(engine.compute_gramian(losses))``, by one pass through the activations
        instead of two: these gradients come from the factors of the Gramian. Other leaves that
        require a gradient, such as heads behind a trunk that alone is the engine's, get that of the
        sum of the losses, as by ``torchjd.autojac.mtl_backward``: each head that of its own task's
        loss. An ordinary backward pass between these leaves and the losses computes it, so that
        verification compares J alone. Gradients are dense, and hooks on parameters run.
        Activations that retain their gradient get none.

        Args:
            losses: As for :meth:`autogram.Engine.compute_gramian`.
            weighting: Maps the Gramian ``(m, m)`` to weights, of shape ``(m,)`` or that of the
                losses: any function, or a weighting of torchjd. It is called outside of autocast.
            scaler: A `torch.amp.GradScaler`, which is given the losses without its scale. The
                gradients have it, as ``scaler.step`` expects. Where something overflows, weights
                and gradients are not a number, so that the scaler skips the step, on all ranks; the
                weighting is not called. Reading whether it did waits for the device.
            gradients_outside: Which gradient leaves get that require one and are no part of J:
                ``"sum"``, that of the sum of all losses, over samples and ranks as well; or
                ``"weighted"``, that of the weighted losses, as ``losses.backward(weights)``.
            retain_graph: Whether to keep the graph. If not, the pass frees it, or, where another
                pass might be needed, it goes when the losses go.
            return_gramian: Whether to return the Gramian as well.

        Returns:
            The weights in the losses' shape, or a list or a dict of them as the losses are, and the
            Gramian ``(m, m)`` if asked for; detached, in at least float32.

            Cost: that of :meth:`autogram.Engine.compute_gramian`, and the weights' gradients. RAM:
            the cotangents of all activations until the weights are known, and rows as with
            ``keep="rows"``, whose RAM the engine keeps on a CPU.

        Raises:
            InvalidOperandError: The weights have another shape, or the weighting is no function of
                a Gramian: it is an aggregator, a weighting of rows, or a tensor.
            InvalidOptionError: ``scaler`` is none, or ``gradients_outside`` is neither value.
            NonFiniteError: The weights are not finite. Nothing is added to ``.grad`` then. On a
                GPU, which is not waited for, zeros are added, and a later call raises the error.
            UnsupportedError: Without ``distributed``, gradients would be exchanged.
            MemoryLimitError: Memory ran out twice, or once after a part of the graph was freed.
            AutogramError: As for :meth:`autogram.Engine.compute_gramian`.

        References:
            Bu, Wang, Zha and Karypis 2022, arXiv:2210.00038: gradients from kept cotangents.
            Sener and Koltun 2018, arXiv:1810.04650, algorithm 2: heads by their own losses.
        """
        check_outside(gradients_outside)
        scale = Scale(weighting, scaler)
        memory = self._devices.step() if self._ranks is None else nullcontext()
        with (
            memory as arena,
            Accumulation(
                Step(self, "rows", scale, gradients_outside, is_only=True, arena=arena)
            ) as step,
        ):
            step.add(losses, retain_graph=retain_graph)
            # The rows are gone before another step may write where they are.
        (weights,) = step.weights
        return (weights, step.gramian) if return_gramian else weights

    def accumulate(
        self,
        weighting: Weighting,
        *,
        keep: Keep = "auto",
        scaler: GradScaler | None = None,
        gradients_outside: GradientsOutside = "sum",
    ) -> Accumulation:
        """A block that takes in the losses of several micro-batches as those of one step.

        At its end, all objectives have one Gramian and one set of weights, and Jᵀ w is added into
        ``.grad``, as :meth:`backward` would do for all losses at once. If the block is left by an
        error, nothing is written.

        Args:
            weighting: As for :meth:`backward`: maps the Gramian of all objectives, in the order in
                which they were added, to their weights.
            keep: As for :meth:`autogram.Engine.jacobian`: what to keep between micro-batches.
            scaler: As for :meth:`backward`. An overflow in one micro-batch skips the step.
            gradients_outside: As for :meth:`backward`: of the losses of all micro-batches.

        Returns:
            A context manager with a method ``add(losses)``, and behind the block with ``gramian``
            and ``weights``, for each call of ``add`` in the form of its losses.

            Cost: for each micro-batch, a backward pass through the activations; at the end, one
            product for all samples, whose cost grows with the square of their number, and the
            weights' gradients. RAM: factors or rows of all micro-batches, whichever are smaller.

        Raises:
            InvalidOperandError: The weighting is no function of a Gramian.
            InvalidOptionError: ``keep`` or ``scaler`` is none, or ``gradients_outside`` is neither
                value.
            AutogramError: As for :meth:`backward`.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from autogram import Engine
            >>> model = nn.Linear(3, 1)
            >>> engine = Engine(model)
            >>> with engine.accumulate(lambda gramian: gramian.diagonal().rsqrt()) as batch:
            ...     for x in torch.randn(6, 3).split(2):
            ...         batch.add(model(x).square().squeeze(1))
            >>> batch.gramian.shape
            torch.Size([6, 6])
        """
        check_keep(keep)
        check_outside(gradients_outside)
        scale = Scale(weighting, scaler)
        scale.check()
        return Accumulation(Step(self, keep, scale, gradients_outside))
