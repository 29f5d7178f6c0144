"""Uses of nodes: what a node reads at the end of the samples' places, and the rows of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from autogram._blocks import Layout, Limit, Region
from autogram._capture.autograd.cotangents import carried_out, vjps_of_node
from autogram._capture.autograd.graph import arriving, kind_of_node, nodes_from
from autogram._capture.autograd.passes import Pass
from autogram._capture.autograd.recomputing import Lent, Recomputing
from autogram._capture.from_graph.ends import End, Graph
from autogram._capture.from_graph.views import viewed
from autogram._capture.places.probe import Prober
from autogram._capture.recording import Channel, Recording
from autogram._capture.tracked import Tracked, real_shape, track_parameter
from autogram._capture.uses import Contribution, FallbackUse, KeptRecipe, RuleUse
from autogram._undo import undone
from autogram.errors import UnsupportedError
from autogram.rules.nodes import NodeRecipe, node_recipe, node_rule, read_fields


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


def make_uses(
    channel: Channel, graph: Graph, ends: Sequence[End], names: Mapping[Tensor, str]
) -> list[tuple[NodeUse, int]]:
    """The uses at some ends, with the numbers of their nodes.

    Args:
        channel: Of the engine.
        graph: The graph of the losses.
        ends: Where places end.
        names: The parameters of J.
    """
    recording = Recording(channel, dict(names))
    inside = {id(p) for p in names}
    tracked: dict[tuple[Any, int], Tracked] = {}
    uses: list[tuple[NodeUse, int]] = []
    for number, positions in ends:
        node = graph.nodes[number]
        read: dict[tuple[Any, int], list[NodeRecipe | None]] = {}
        for position in positions:
            edge = node.next_functions[position]
            read.setdefault(edge, []).append(_recipe(node, position))
            if edge not in tracked:
                tracked[edge] = _tracked(edge[0], edge[1], graph, inside)
        by_recipe = {edge: of for edge, of in read.items() if None not in of}
        described = recording, len(uses), node.name()
        if by_recipe:
            use = _by_recipe(described, node, by_recipe, tracked)
            uses.append((use, number))
        rest = [edge for edge in read if edge not in by_recipe]
        for i in range(len(node._input_metadata) if rest else 0):
            described = recording, len(uses), node.name()
            uses.append((_by_rows(described, node, i, rest, tracked), number))
    return uses


def _recipe(node: Any, position: int) -> NodeRecipe | None:
    """The recipe for an input of a node, if one is known."""
    operation = kind_of_node(node.__class__).operation
    return node_recipe(operation, node, position) if operation else None


def _by_recipe(
    described: tuple[Recording, int, str],
    node: Any,
    by_recipe: Mapping[tuple[Any, int], list[Any]],
    tracked: Mapping[tuple[Any, int], Tracked],
) -> RecipeUse:
    """The use of all that a node reads by recipes."""
    pairs = [(tracked[edge], recipe) for edge, of in by_recipe.items() for recipe in of]
    recipes: list[KeptRecipe] = []
    fields: list[str] = []
    for of, (formula, names) in pairs:
        recipes.append(KeptRecipe((of,), formula, slice(len(fields), len(fields) + len(names))))
        fields += names
    shape, reads = tuple(node._input_metadata[0].shape), tuple([of for of, _ in pairs])
    rule, rows = (
        node_rule(kind_of_node(node.__class__).operation),
        _by_rows(described, node, 0, by_recipe, tracked),
    )
    return RecipeUse(*described, shape, reads, recipes, rule, rows.edge, tuple(fields), rows)


def _by_rows(
    described: tuple[Recording, int, str],
    node: Any,
    result: int,
    edges: Iterable[tuple[Any, int]],
    tracked: Mapping[tuple[Any, int], Tracked],
) -> RowsUse:
    """The use of all that is at some edges of a node, by a result of it."""
    shape, reads = tuple(node._input_metadata[result].shape), tuple([tracked[x] for x in edges])
    inputs = tuple([GradientEdge(*x) for x in edges])
    return RowsUse(*described, shape, reads, GradientEdge(node, result), inputs)


def _tracked(node: Any, result: int, graph: Graph, inside: set[int]) -> Tracked:
    """A parameter, a view of one, or a tensor whose rows are pulled back."""
    if node in graph.plain:
        chain: list[tuple[Any, int]] = []
        at, number = node, result
        while not hasattr(at, "variable"):
            chain.append((at, number))
            ((at, number),) = at.next_functions
        parameter: Tensor = at.variable
        whole = track_parameter(parameter)
        if not chain:
            return whole
        view = viewed(parameter, chain[::-1])
        is_own = view is not None and not parameter.is_complex()
        if view is not None and is_own and whole.region == Region.of(parameter):
            region = Region.of(view)
            if region.is_injective and view.untyped_storage().data_ptr() == _start(parameter):
                return Tracked.of(view, (parameter,), region, whole.region)
    behind = nodes_from([node])
    leaves = [x.variable for x in behind if id(getattr(x, "variable", None)) in inside]
    of = node._input_metadata[result]
    edge = GradientEdge(node, result)
    return Tracked(tuple(leaves), None, real_shape(of), of.dtype, of.device, 0, edge)


def _start(tensor: Tensor) -> int:
    """The address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()
