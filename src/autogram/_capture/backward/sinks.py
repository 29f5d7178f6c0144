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

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Takes all columns of a parameter, which come once in a pass."""
        ...


class GramianSum:
    """Adds up the Gramian, and drops the columns: few are alive at a time.

    In a pass that is verified, small columns are contracted twice: in bundles, as ever, and one by
    one, so that what is wrong has a name.

    Args:
        limit: That of the engine.
        check: The verification of this pass, if there is one.
    """

    def __init__(self, limit: Limit, check: Check | None = None) -> None:
        self._limit = limit
        self._check = check
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
        if ready == [columns] and part is not None:
            self._add(part)
        elif ready:
            self._add(self._gram(ready))

    @retried_with_less
    def _gram(self, bundle: list[Columns]) -> Tensor | None:
        """The sum of the Gramians of some columns."""
        return gram_of_bundle(bundle)

    def _add(self, part: Tensor | None) -> None:
        """Adds the Gramian of some columns."""
        if part is None:
            return
        total = self._total
        self._total = part if total is None else total + part.to(total.device)

    def arranged(self, objectives: Objectives) -> Tensor:
        """The Gramian, ``(m, m)``, in the row-major order of the losses."""
        for bundle in self._bundles.rest():
            self._add(self._gram(bundle))
        if self._total is None:
            m = objectives.losses.numel()
            dtype = torch.promote_types(objectives.losses.dtype, torch.float32)
            return objectives.losses.new_zeros(m, m, dtype=dtype)
        return objectives.arrange_gramian(self._total)


class Store:
    """Keeps the columns, to be contracted later and more than once.

    Args:
        form: Whether to keep factors or rows.
        limit: That of the engine. Rows that are larger than factors may have as much together.
        check: The verification of this pass, if there is one.
        arena: Where to put rows. What an earlier store has put there is lost.

    Attributes:
        columns: Those of each parameter that the losses reach.
    """

    def __init__(
        self, form: Keep, limit: Limit, check: Check | None = None, arena: Arena | None = None
    ) -> None:
        self._check = check
        self._form: Keep = form
        self._memory = None
        if arena is not None:
            arena.restart()
            self._memory = arena.take
        self._limit = limit
        self._taken = 0
        self.columns: dict[Tensor, Columns] = {}

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Keeps the columns."""
        assert parameter not in self.columns
        self._taken += self._keep(columns)
        self.columns[parameter] = columns
        if self._check is not None:
            self._show(self._check, parameter, columns)

    @retried_with_less
    def _keep(self, columns: Columns) -> int:
        """Prepares columns for several products, and returns how much room they take."""
        return columns.keep(self._form, self._limit.elements - self._taken, self._memory)

    @retried_with_less
    def _show(self, check: Check, parameter: Tensor, columns: Columns) -> None:
        """Shows columns to a check."""
        check.see_columns(parameter, columns)


class StoreWithGramian(Store):
    """Keeps the columns, and adds up the Gramian while they are at hand.

    Attributes:
        gramian: The Gramian so far.
    """

    def __init__(
        self, form: Keep, limit: Limit, check: Check | None = None, arena: Arena | None = None
    ) -> None:
        super().__init__(form, limit, check, arena)
        self.gramian = GramianSum(limit)

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Keeps the columns, and contracts them."""
        super().take(parameter, columns)
        self.gramian.take(parameter, columns)
