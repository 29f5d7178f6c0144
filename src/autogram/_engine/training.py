"""An engine's steps: from losses to gradients in ``.grad``."""

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
    """An engine's modules, and their training steps with one batch or many micro-batches."""

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
        weights ``weighting(engine.compute_gramian(losses))``, in one pass through the activations
        instead of two: these gradients come from the factors of the Gramian. Other leaves that
        require a gradient, such as heads after a trunk that the engine covers alone, get the
        gradient of the sum of the losses, as with ``torchjd.autojac.mtl_backward``: each head gets
        that of its own task's loss. An ordinary backward pass between these leaves and the losses
        computes it; verification compares only J. Gradients are dense, and hooks on parameters run.
        Activations that retain their gradient get none.

        Args:
            losses: As for :meth:`autogram.Engine.compute_gramian`.
            weighting: Maps the Gramian ``(m, m)`` to weights, of shape ``(m,)`` or that of the
                losses: any function, or a weighting of torchjd. It is called outside autocast.
            scaler: A `torch.amp.GradScaler`; pass unscaled losses. The gradients are scaled, as
                ``scaler.step`` expects. If something overflows, weights
                and gradients are NaN, so that the scaler skips the step, on all ranks; the
                weighting is not called. Checking for an overflow waits for the device.
            gradients_outside: The gradient of leaves outside J that require one:
                ``"sum"``, that of the sum of all losses, over samples and ranks as well; or
                ``"weighted"``, that of the weighted losses, as ``losses.backward(weights)``.
            retain_graph: Whether to keep the graph. If not, the pass frees it; if another
                pass might be needed, the graph is freed with the losses.
            return_gramian: Whether to return the Gramian as well.

        Returns:
            The weights in the losses' shape, or in a list or a dict like the losses; and the
            Gramian ``(m, m)`` if requested; detached, in at least float32.

            Cost: that of :meth:`autogram.Engine.compute_gramian`, and the weights' gradients. RAM:
            the cotangents of all activations until the weights are known, and rows as with
            ``keep="rows"``, whose RAM the engine keeps on a CPU.

        Raises:
            InvalidOperandError: The weights have another shape, or the weighting is not a function
                of a Gramian: it is an aggregator, a weighting of rows, or a tensor.
            InvalidOptionError: ``scaler`` is not a gradient scaler, or ``gradients_outside`` is
                neither value.
            NonFiniteError: The weights are not finite, and nothing is added to ``.grad``. On a
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
            # The rows must be gone before another step writes to their memory.
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
        """A block that collects the losses of several micro-batches into one step.

        At its end, all objectives have one Gramian and one set of weights, and Jᵀ w is added into
        ``.grad``, as :meth:`backward` would do for all losses at once. If an error leaves the
        block, nothing is written.

        Args:
            weighting: As for :meth:`backward`: maps the Gramian of all objectives, in the order of
                the calls of ``add``, to their weights.
            keep: As for :meth:`autogram.Engine.jacobian`: what to keep between micro-batches.
            scaler: As for :meth:`backward`. An overflow in one micro-batch skips the step.
            gradients_outside: As for :meth:`backward`: of the losses of all micro-batches.

        Returns:
            A context manager with a method ``add(losses)``. After the block, it has ``gramian``
            and ``weights``, for each call of ``add`` in the form of its losses.

            Cost: for each micro-batch, a backward pass through the activations; at the end, one
            product for all samples, whose cost grows with the square of their number, and the
            weights' gradients. RAM: factors or rows of all micro-batches, whichever are smaller.

        Raises:
            InvalidOperandError: The weighting is not a function of a Gramian.
            InvalidOptionError: ``keep``, ``scaler`` or ``gradients_outside`` is invalid.
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
