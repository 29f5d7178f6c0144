"""Uses of nodes: what a node reads where the samples' places end, and the rows of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from autogram._blocks import Layout, Limit
from autogram._capture.autograd.cotangents import vjps_of_node
from autogram._capture.autograd.passes import Pass
from autogram._capture.autograd.recomputing import Lent, Recomputing
from autogram._capture.places.probe import Prober
from autogram._capture.uses import Contribution, FallbackUse, RuleUse
from autogram._undo import undone
from autogram.errors import UnsupportedError
from autogram.rules._nodes import read_fields


class _FailedError(RuntimeError):
    """A Function in Python has refused a cotangent, perhaps because several came together."""


@dataclass(eq=False, slots=True)
class RowsUse(FallbackUse):
    """What a node reads in any other way: rows by vector-Jacobian products of the node alone."""

    inputs: tuple[GradientEdge, ...]
    lent: Lent | None = field(default=None, kw_only=True)
    """What the node saved, if it is in a part of a checkpoint."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Nothing that the node saved."""
        return ()

    def vjps(self, cotangents: Tensor) -> list[Tensor | None]:
        """Products of cotangents ``(n, *output)`` with the derivatives by each input."""
        node: Any = self.edge.node
        arguments = self.recording.channel, self.edge, self.inputs, cotangents, self._carry_out
        if isinstance(node, BackwardCFunction):  # which runs in passes of its own
            try:
                return vjps_of_node(*arguments)
            except _FailedError:
                raise UnsupportedError(
                    f"`{self.function}` cannot be carried out for one sample at a time: its "
                    "`backward` raises an error, or waits for other processes. Let it take any "
                    "cotangent."
                ) from None
        again = Recomputing(() if self.lent is None else self.lent.parts)
        alone = Pass(self.recording.channel, is_alone=True)
        with undone(again.release):
            # In the pass of the losses, PyTorch lets a node compute no gradient of a parameter.
            return again.call(alone, partial(vjps_of_node, *arguments))

    def _carry_out(self, cotangents: Sequence[Tensor | None]) -> Any:
        """What the node gives its inputs."""
        node: Any = self.edge.node
        if not isinstance(node, BackwardCFunction):
            if self.lent is not None:
                self.lent.give_back()
            return node(*cotangents)
        gradients = Prober(self.recording.channel, [node]).gradients(node, cotangents)
        if gradients is None:
            raise _FailedError
        return tuple([gradients.get(position) for position in range(len(node.next_functions))])


@dataclass(eq=False, slots=True)
class RecipeUse(RuleUse):
    """What a node reads whose factors are among the tensors that it saved."""

    edge: GradientEdge
    """The result of the node whose cotangent is shown."""
    fields: tuple[str, ...]
    """The names of these tensors."""
    inputs: tuple[GradientEdge, ...]
    """Where each of the tensors that are read enters the node, once."""
    lent: Lent | None = field(default=None, kw_only=True)
    """What the node saved, if it is in a part of a checkpoint."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, which are read once in a pass; none if the node saved something else."""
        return read_fields(self.lent or self.edge.node, self.fields) or ()

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: Limit
    ) -> list[Contribution]:
        """The blocks, as factors if the node saved them, and as rows otherwise."""
        if saved or not self.fields:
            return RuleUse.contributions(self, layout, cotangent, saved, limit)
        described = self.recording, self.index, self.function, self.shape
        reads = tuple(dict.fromkeys(self.reads))
        rows = RowsUse(*described, reads, self.edge, self.inputs, lent=self.lent)
        return rows.contributions(layout, cotangent, (), limit)


NodeUse = RecipeUse | RowsUse
