"""Uses of nodes: what a node reads where the samples' places end, and the rows of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from autogram._blocks import Layout, Limit
from autogram._capture.autograd.cotangents import carried_out, vjps_of_node
from autogram._capture.autograd.graph import arriving
from autogram._capture.autograd.passes import Pass
from autogram._capture.autograd.recomputing import Lent, Recomputing
from autogram._capture.places.probe import Prober
from autogram._capture.uses import Contribution, FallbackUse, RuleUse
from autogram._undo import undone
from autogram.errors import UnsupportedError
from autogram.rules._nodes import read_fields


class _FailedError(RuntimeError):
    """A Function in Python has raised an error."""


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
        channel, node = self.recording.channel, self.edge.node
        is_python = isinstance(node, BackwardCFunction)
        if is_python:
            try:
                return carried_out(channel, self._run_alone, cotangents, [node], len(self.inputs))
            except _FailedError:
                raise UnsupportedError(
                    f"`{node.name()}` cannot be carried out for one sample at a time: its "
                    "`backward` raises an error, or waits for other processes. Let it take any "
                    "cotangent."
                ) from None
        # In a pass of its own: in that of the losses, PyTorch lets a node compute no gradient of a
        # parameter.
        lend = () if self.lent is None else (self.lent.give_back,)
        again = Recomputing(() if self.lent is None else self.lent.parts)
        vjps = partial(vjps_of_node, channel, self.edge, self.inputs, cotangents, *lend)
        with undone(again.release):
            return again.call(Pass(channel, is_alone=True), vjps)

    def _run_alone(self, cotangent: Tensor) -> dict[int, Tensor]:
        """What a Function in Python gives its inputs, in a pass that ends there."""
        node, result = self.edge.node, self.edge.output_nr
        count = len(node._input_metadata)
        cotangents = [cotangent if i == result else None for i in range(count)]
        gradients = Prober(self.recording.channel, [node]).gradients(node, cotangents)
        if gradients is None:
            raise _FailedError
        places = {(edge.node, edge.output_nr): i for i, edge in enumerate(self.inputs)}
        totals: dict[int, Tensor] = {}
        for position, edge in enumerate(node.next_functions):
            gradient = gradients.get(position)
            if gradient is not None and edge in places:
                gradient = arriving(gradient, *edge)
                i = places[edge]
                totals[i] = totals[i] + gradient if i in totals else gradient
        return totals


@dataclass(eq=False, slots=True)
class RecipeUse(RuleUse):
    """What a node reads whose factors are among the tensors that it saved."""

    edge: GradientEdge
    """The result of the node whose cotangent is shown."""
    fields: tuple[str, ...]
    """The names of these tensors."""
    rows: RowsUse
    """The same without recipes, for a node that saved something else."""
    lent: Lent | None = field(default=None, kw_only=True)
    """What the node saved, if it is in a part of a checkpoint."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, which are read once in a pass; none if the node saved something else."""
        self.rows.lent = self.lent
        return read_fields(self.lent or self.edge.node, self.fields) or ()

    def contributions(
        self, layout: Layout | None, cotangent: Tensor, saved: tuple[Tensor, ...], limit: Limit
    ) -> list[Contribution]:
        """The blocks, as factors if the node saved them."""
        if self.fields and not saved:
            return self.rows.contributions(layout, cotangent, saved, limit)
        return RuleUse.contributions(self, layout, cotangent, saved, limit)


NodeUse = RecipeUse | RowsUse
