"""Gradient accumulation: one Gramian and one set of weights for many micro-batches."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from autogram._engine.steps import Step
from autogram._losses import Losses
from autogram._undo import undoing
from autogram.errors import InvalidOperandError


class Accumulation:
    """The micro-batches of one step, in a block of :meth:`autogram.Engine.accumulate`.

    Between micro-batches, it keeps factors or rows, but no graph. If a leaf outside J
    requires a gradient, the graph stays until the end of the block; with `fully_shard`, that of
    the last micro-batch does, for passes of other ranks.

    Do not change inputs until the end of the block: factors are the inputs of layers and the
    cotangents of their outputs. Changes in place raise
    :class:`~autogram.errors.ChangedTensorError`, except those that PyTorch does not count: through
    ``.data``, or a NumPy array that shares the memory.
    """

    def __init__(self, step: Step) -> None:
        self._step: Step | None = step
        self._is_open = False
        self._found: tuple[Tensor, list[Any]] | None = None

    @undoing
    def add(self, losses: Losses, *, retain_graph: bool = False) -> None:
        """Adds the losses of a micro-batch, with one pass through the activations.

        Args:
            losses: As for :meth:`autogram.Engine.compute_gramian`, and with any number of
                objectives.
            retain_graph: Whether to keep their graph, because other losses share it.

        Raises:
            InvalidOperandError: It is not called inside the block.
            AutogramError: As for :meth:`autogram.Engine.backward`.
        """
        if self._step is None or not self._is_open:
            raise InvalidOperandError(
                "Losses are added outside the block of `engine.accumulate`. Call `add` inside: "
                "`with engine.accumulate(weighting) as batch: batch.add(losses)`."
            )
        self._step.add(losses, retain_graph=retain_graph)

    @property
    def gramian(self) -> Tensor:
        """The Gramian ``(m, m)`` of all objectives, in the order of :meth:`add`."""
        return self._result()[0]

    @property
    def weights(self) -> list[Any]:
        """The weights of each call of :meth:`add`, in the form of its losses."""
        return self._result()[1]

    def _result(self) -> tuple[Tensor, list[Any]]:
        """The Gramian and the weights of the block."""
        if self._found is None:
            raise InvalidOperandError(
                "Look at the Gramian and the weights of an accumulation after its `with` block. "
                "They exist if losses were added and no error was raised."
            )
        return self._found

    def __enter__(self) -> Self:
        if self._step is None or self._is_open:
            raise InvalidOperandError(
                "Call `engine.accumulate(weighting)` for each step. This block of "
                "`engine.accumulate` is entered a second time."
            )
        self._is_open = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        try:
            self._found = step.finish(error)
        except BaseException as raised:
            step.abandon(raised)
            raise
