"""Sinks: what is done with the columns of a parameter once they are complete."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from autogram._blocks import Arena, Bundles, Columns, Keep, gram_of_bundle
from autogram._capture.backward.verification import Check
from autogram._capture.limit import Limit, retried_with_less
from autogram._capture.samples.objectives import Objectives


class Sink(Protocol):
    """Takes the columns of one parameter after the other."""

    def restart(self, objectives: Objectives) -> None:
        """A pass begins, and what an earlier one has given is void."""
        ...

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Takes all columns of a parameter, which come once in a pass."""
        ...

    def finish(self) -> None:
        """The pass is over, and the columns of every parameter have come."""
        ...


class GramianSum:
    """Adds up the Gramian, and drops the columns: few are alive at a time.

    In a pass that is verified, small columns are contracted twice: in bundles, as ever, and one by
    one, so that what is wrong has a name.

    Args:
        limit: That of the engine.
        check: The verification of this pass, if it is shown no columns elsewhere.

    Attributes:
        gramian: The Gramian ``(m, m)``, in the row-major order of the losses, once it is finished.
    """

    gramian: Tensor

    def __init__(self, limit: Limit, check: Check | None = None) -> None:
        self._limit = limit
        self._check = check

    def restart(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._bundles = Bundles()
        self._total: Tensor | None = None

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Adds the Gramian of the columns to the total, or keeps them for a bundle."""
        part = None
        if self._check is not None:
            part = self._gram([columns])
            if part is not None:
                self._check.see_gramian(parameter, part)
        ready = self._bundles.add(columns)
        if ready:
            self._add(part if part is not None and ready == [columns] else self._gram(ready))

    def finish(self) -> None:
        """Adds what still waits for a bundle, and puts the objectives in order."""
        for bundle in self._bundles.rest():
            self._add(self._gram(bundle))
        objectives, total = self._objectives, self._total
        if total is None:
            m = objectives.losses.numel()
            dtype = torch.promote_types(objectives.losses.dtype, torch.float32)
            total = objectives.losses.new_zeros(1, m, 1, m, dtype=dtype)
        self.gramian = objectives.in_order(total.flatten(0, 1).flatten(1), 0, 1)
        if self._check is not None:
            self._check.gramian = self.gramian

    @retried_with_less
    def _gram(self, bundle: list[Columns]) -> Tensor | None:
        """The sum of the Gramians of some columns."""
        return gram_of_bundle(bundle)

    def _add(self, part: Tensor | None) -> None:
        """Adds the Gramian of some columns, ``None`` where they are zero."""
        if part is not None:
            total = self._total
            self._total = part if total is None else total + part.to(total.device)


class KeptColumns:
    """Keeps the columns, to be contracted later and more than once.

    Args:
        form: Whether to keep factors or rows.
        limit: That of the engine. Rows that are larger than factors may have as much together.
        check: The verification of this pass, if there is one.
        arena: Where to put rows. What was put there before is lost.

    Attributes:
        columns: Those of each parameter that the losses reach.
    """

    def __init__(
        self, form: Keep, limit: Limit, check: Check | None = None, arena: Arena | None = None
    ) -> None:
        self._form: Keep = form
        self._limit = limit
        self._check = check
        self._arena = arena
        self._taken = 0
        self.columns: dict[Tensor, Columns] = {}

    def restart(self, objectives: Objectives) -> None:
        del objectives
        self.columns.clear()
        self._taken = 0
        if self._arena is not None:
            self._arena.restart()

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Keeps the columns."""
        assert parameter not in self.columns
        self._taken += self._keep(columns)
        self.columns[parameter] = columns
        if self._check is not None:
            self._show(self._check, parameter, columns)

    def finish(self) -> None:
        """There is nothing left to do."""

    @retried_with_less
    def _keep(self, columns: Columns) -> int:
        """Prepares columns for several products, and returns how many elements they take."""
        memory = None if self._arena is None else self._arena.take
        return columns.keep(self._form, self._limit.elements - self._taken, memory)

    @retried_with_less
    def _show(self, check: Check, parameter: Tensor, columns: Columns) -> None:
        """Shows columns to a check."""
        check.see_columns(parameter, columns)
