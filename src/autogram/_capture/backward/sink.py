"""The sink: what is done with the columns of a parameter once they are complete."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._blocks import Arena, Bundles, Columns, Keep, gram_of_bundle
from autogram._capture.backward.verification import Check
from autogram._capture.limit import Limit, retried_with_less
from autogram._capture.samples.objectives import Objectives


class Sink:
    """Takes the columns of one parameter after the other, keeps them, and adds up the Gramian.

    Columns that are not kept are dropped once they are contracted: few are alive at a time. In a
    pass that is verified, small ones are then contracted twice: in bundles, as ever, and one by
    one, so that what is wrong has a name.

    Args:
        limit: That of the engine.
        form: Whether to keep factors or rows, or ``None`` to keep nothing.
        arena: Where to put kept rows. What was put there before is lost.
        is_summed: Whether to add up the Gramian.

    Attributes:
        columns: Those of each parameter that the losses reach, if they are kept.
        gramian: The Gramian ``(m, m)``, in the row-major order of the losses; empty if it is not
            added up.
    """

    def __init__(
        self,
        limit: Limit,
        form: Keep | None = None,
        arena: Arena | None = None,
        *,
        is_summed: bool = True,
    ) -> None:
        self._limit = limit
        self._form: Keep | None = form
        self._arena = arena
        self._is_summed = is_summed
        self.columns: dict[Tensor, Columns] = {}
        self.gramian = torch.empty(0, 0, device="cpu")

    def restart(self, objectives: Objectives, check: Check | None) -> None:
        """A pass begins, and what an earlier one has given is void."""
        self._check = check
        self._objectives = objectives
        self._bundles = Bundles()
        self._total: Tensor | None = None
        self._taken = 0
        self.columns.clear()
        if self._arena is not None:
            self._arena.restart()

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Takes all columns of a parameter, which come once in a pass."""
        if self._form is not None:
            assert parameter not in self.columns
            self._taken += self._keep(columns, self._form)
            self.columns[parameter] = columns
        part = None if self._check is None else self._show(self._check, parameter, columns)
        if self._is_summed and (ready := self._bundles.add(columns)):
            self._add(part if part is not None and ready == [columns] else self._gram(ready))

    def finish(self) -> None:
        """The pass is over: adds what still waits for a bundle, and puts objectives in order."""
        if not self._is_summed:
            return
        for bundle in self._bundles.rest():
            self._add(self._gram(bundle))
        total, losses = self._total, self._objectives.losses
        m = losses.numel()
        if total is None:
            total = losses.new_zeros(m, m, dtype=torch.promote_types(losses.dtype, torch.float32))
        self.gramian = self._objectives.in_order(total.reshape(m, m), 0, 1)

    @retried_with_less
    def _keep(self, columns: Columns, form: Keep) -> int:
        """Prepares columns for several products, and returns how many elements they take."""
        memory = None if self._arena is None else self._arena.take
        return columns.keep(form, self._taken, memory)

    @retried_with_less
    def _show(self, check: Check, parameter: Tensor, columns: Columns) -> Tensor | None:
        """Shows columns to the check, which returns their Gramian if it needs that."""
        return check.see_columns(parameter, columns, are_kept=self._form is not None)

    @retried_with_less
    def _gram(self, bundle: list[Columns]) -> Tensor | None:
        """The sum of the Gramians of some columns."""
        return gram_of_bundle(bundle)

    def _add(self, part: Tensor | None) -> None:
        """Adds the Gramian of some columns, ``None`` where they are zero."""
        if part is not None:
            total = self._total
            self._total = part if total is None else total + part.to(total.device)
