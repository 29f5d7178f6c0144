"""Plans: how the uses of all graphs of one key are read, so that little is asked of the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from autogram._blocks import Region
from autogram._capture.autograd.graph import kind_of_node, nodes_from, nodes_leading_to
from autogram._capture.from_graph.ends import End, Graph
from autogram._capture.from_graph.node_uses import NodeUse, RecipeUse, RowsUse
from autogram._capture.from_graph.tensor_hooks import are_hooked
from autogram._capture.from_graph.views import viewed
from autogram._capture.recording import Channel, Recording
from autogram._capture.tracked import Tracked, real_shape, track_parameter
from autogram._capture.uses import KeptRecipe
from autogram.rules._nodes import NodeRecipe, joint_recipe, node_recipe, node_rule

_NodeResult = tuple[Any, int]


@dataclass(frozen=True)
class _Target:
    """What is at an end: a parameter, a view of one, or a tensor that is computed from some."""

    edge: tuple[int, int]
    """The number of its node, and which result of the node it is."""
    leaves: tuple[int, ...]
    """The numbers of the parameters' nodes."""
    chain: tuple[tuple[int, int], ...] | None
    """The nodes of the views, from the parameter on; ``None`` if it is no view."""
    regions: dict[Region, Region | None] = field(default_factory=dict)
    """Which elements a view has, by where those of the parameter are."""

    def tracked(self, nodes: Sequence[Any]) -> Tracked:
        """The tensor in a graph with some nodes."""
        node, result = nodes[self.edge[0]], self.edge[1]
        if self.chain is not None:
            parameter: Tensor = nodes[self.leaves[0]].variable
            whole = track_parameter(parameter)
            if not self.chain:
                return whole
            views = [nodes[number] for number, _ in self.chain]
            region = None if are_hooked(views) else self._region(parameter, whole, nodes)
            if region is not None:
                of, device = parameter.dtype, parameter.device
                place = whole.region
                return Tracked((parameter,), region, region.shape, of, device, 0, place=place)
        leaves = tuple([nodes[number].variable for number in self.leaves])
        of, edge = node._input_metadata[result], GradientEdge(node, result)
        return Tracked(leaves, None, real_shape(of), of.dtype, of.device, 0, edge)

    def _region(self, parameter: Tensor, whole: Tracked, nodes: Sequence[Any]) -> Region | None:
        """The elements that a view has, if it is one of the parameter's own memory."""
        assert whole.region is not None
        assert self.chain is not None
        if parameter.is_complex() or whole.region != Region.of(parameter):
            return None
        if whole.region not in self.regions:
            view = viewed(parameter, [(nodes[number], result) for number, result in self.chain])
            region = (
                None if view is None or _memory(view) != _memory(parameter) else Region.of(view)
            )
            self.regions[whole.region] = region if region and region.is_injective else None
        return self.regions[whole.region]


@dataclass(frozen=True)
class _ResultPlan:
    """How one result of a node depends on what is at the node's ends."""

    node: int
    result: int
    shape: tuple[int, ...]
    recipes: tuple[tuple[tuple[int, ...], NodeRecipe], ...]
    """The recipes, each with the numbers of its targets."""
    by_rows: tuple[int, ...]
    """The targets that have no recipe."""

    @classmethod
    def of(cls, node: Any, number: int, result: int, targets: Mapping[int, int]) -> _ResultPlan:
        """The plan for a result, by the number of the target at each position of an end."""
        operation = kind_of_node(node.__class__).operation
        shape = tuple(node._input_metadata[result].shape)
        joint = joint_recipe(operation, node, sorted(targets), result)
        if joint is not None:
            together = tuple([targets[position] for position in sorted(targets)])
            return cls(number, result, shape, ((together, joint),), ())
        each = [(targets[x], node_recipe(operation, node, x, result)) for x in sorted(targets)]
        # A tensor that is read twice has rows of the node if one of the two has no recipe.
        by_rows = {target: None for target, recipe in each if recipe is None}
        recipes = [((target,), of) for target, of in each if of and target not in by_rows]
        return cls(number, result, shape, tuple(recipes), tuple(by_rows))


@dataclass(frozen=True)
class UsePlan:
    """How the uses are read of all graphs that have some key, and nodes of some shapes."""

    results: Sequence[_ResultPlan]
    targets: Sequence[_Target]
    last: frozenset[int]
    """The nodes of uses after which there is no other use."""

    @classmethod
    def of(cls, graph: Graph, ends: Sequence[End]) -> UsePlan:
        """The plan for the ends of places in a graph."""
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        edges = [graph.root, *[edge for node in graph.order for edge in node.next_functions]]
        results: dict[Any, set[int]] = {}
        for node, result in edges:
            results.setdefault(node, set()).add(result)
        targets: dict[_NodeResult, int] = {}
        made: list[_Target] = []
        plans: list[_ResultPlan] = []
        for number, positions in ends:
            node = graph.nodes[number]
            for edge in [node.next_functions[x] for x in positions]:
                if edge not in targets:
                    targets[edge] = len(made)
                    made.append(_target(edge, graph, numbers))
            at = {x: targets[node.next_functions[x]] for x in positions}
            plans += [_ResultPlan.of(node, number, x, at) for x in sorted(results[node])]
        readers = {graph.nodes[plan.node] for plan in plans}
        leading = nodes_leading_to(readers, graph.nodes)
        last = [x for x in readers if not any(y in leading for y, _ in x.next_functions)]
        return cls(plans, made, frozenset([numbers[node] for node in last]))

    def fits(self, nodes: Sequence[Any]) -> bool:
        """Whether the nodes of uses have the shapes that the plan is for."""
        for plan in self.results:
            if tuple(nodes[plan.node]._input_metadata[plan.result].shape) != plan.shape:
                return False
        return True

    def uses(
        self, nodes: Sequence[Any], channel: Channel, names: Mapping[Tensor, str]
    ) -> list[tuple[NodeUse, int]]:
        """The uses in a graph, with the numbers of their nodes.

        Args:
            nodes: All nodes of the graph.
            channel: Of the engine.
            names: The parameters of J.
        """
        recording = Recording(channel, dict(names))
        tracked = [target.tracked(nodes) for target in self.targets]
        edges = [GradientEdge(nodes[of.edge[0]], of.edge[1]) for of in self.targets]
        uses: list[tuple[NodeUse, int]] = []
        for plan in self.results:
            node = nodes[plan.node]
            output = GradientEdge(node, plan.result)
            if plan.recipes:
                read = [target for targets, _ in plan.recipes for target in targets]
                recipes, fields = _kept(plan, tracked)
                use = RecipeUse(
                    *(recording, len(uses), node.name(), plan.shape),
                    tuple([tracked[i] for i in read]),
                    recipes,
                    node_rule(kind_of_node(node.__class__).operation),
                    output,
                    fields,
                    tuple([edges[i] for i in dict.fromkeys(read)]),
                )
                uses.append((use, plan.node))
            if plan.by_rows:
                described = recording, len(uses), node.name(), plan.shape
                reads = tuple([tracked[i] for i in plan.by_rows])
                inputs = tuple([edges[i] for i in plan.by_rows])
                uses.append((RowsUse(*described, reads, output, inputs), plan.node))
        return uses


def _kept(
    plan: _ResultPlan, tracked: Sequence[Tracked]
) -> tuple[list[KeptRecipe], tuple[str, ...]]:
    """The recipes of a use with its tensors, and the fields for all of them, in order."""
    recipes: list[KeptRecipe] = []
    fields: list[str] = []
    for targets, (formula, names) in plan.recipes:
        start = len(fields)
        fields += names
        operands = tuple([tracked[target] for target in targets])
        recipes.append(KeptRecipe(operands, formula, slice(start, len(fields))))
    return recipes, tuple(fields)


def _memory(tensor: Tensor) -> int:
    """The address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def _target(edge: _NodeResult, graph: Graph, numbers: Mapping[Any, int]) -> _Target:
    """What is at the end of an edge."""
    node, result = edge
    place = numbers[node], result
    if node not in graph.plain:
        leaves = [numbers[x] for x in nodes_from([node]) if x in graph.leaves]
        return _Target(place, tuple(leaves), None)
    chain: list[tuple[int, int]] = []
    while node not in graph.leaves:
        chain.append((numbers[node], result))
        ((node, result),) = node.next_functions
    return _Target(place, (numbers[node],), tuple(chain[::-1]))
