"""The Gramian inside a compiled backward pass: contractions become part of its graph.

Once the places of the samples are certain, nothing about the contractions of a part depends on
values. They are traced on tensors without data, and appended to the graph after the cotangents. The
graph then returns one result ``(k, b, k, b)``; factors never leave it. For a fused step, it
also returns rows or factors, from which gradients are computed once the weights are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autogram._blocks import (
    Bundles,
    Columns,
    Devices,
    Factors,
    Folded,
    Keep,
    Kernels,
    Limit,
    Region,
    Room,
    block_of,
    gram_of_bundle,
)
from autogram._capture.uses import RuleUse


class Inside(NamedTuple):
    """A use that is contracted in the graph."""

    number: int  # number in the part
    use: RuleUse  # of some call, with recipes and regions
    layout: Folded


class Asked(NamedTuple):
    """Requests of a pass."""

    limit: int  # most elements of one intermediate result
    form: Keep | None  # whether to keep factors, rows or nothing


class KeptBlock(NamedTuple):
    """A block of a parameter, whose factors are among the results of a graph."""

    use: int  # number of a use that reads the parameter
    read: int  # number of the tensor among those that the use reads
    region: Region  # with the offset from the parameter's first element
    equation: str
    operands: int  # how many results hold the factors


class Contracted(NamedTuple):
    """Results of the contractions in a graph."""

    results: list[Any]  # the Gramian ``(k, b, k, b)``, then the factors of all kept blocks
    kept: list[KeptBlock]
    taken: int  # elements of kept rows that are larger than their factors

    def factors(
        self, uses: Sequence[RuleUse | None], results: Iterable[Tensor]
    ) -> dict[Tensor, list[Factors]]:
        """The kept factors of each parameter, from the graph's results after the Gramian."""
        rest = iter(results)
        found: dict[Tensor, list[Factors]] = {}
        for block in self.kept:
            use = uses[block.use]
            assert use is not None
            (parameter,) = use.reads[block.read].sources
            region = block.region.shifted(Region.of_parameter(parameter).offset)
            operands = tuple(islice(rest, block.operands))
            found.setdefault(parameter, []).append((region, block_of(block.equation, operands)))
        return found


def key_of(inside: Sequence[Inside], asked: Asked, roots: Collection[int]) -> object:
    """A key of all that the contractions of some uses depend on.

    ``roots`` are the part's arguments that belong to an engine: its uses have recipes for them.
    """
    parameters: dict[int, int] = {}
    regions = tuple(
        (parameters.setdefault(id(t.sources[0]), len(parameters)), t.region and t.region.strides)
        for of in inside
        for t in of.use.reads
    )
    layouts = tuple((of.number, of.layout) for of in inside)
    return asked, regions, layouts, frozenset(roots)


class OutsideError(Exception):
    """A use, given by its number in the part, cannot be contracted in the graph."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def append_contractions(
    graph: fx.Graph,
    inside: Sequence[Inside],
    tensors: Sequence[Sequence[fx.Node]],
    asked: Asked,
    decompositions: Mapping[Any, Any],
) -> Contracted:
    """Appends the contractions of some uses to a graph, which it changes.

    Args:
        graph: The graph.
        inside: The uses.
        tensors: For each use, its cotangent, and the tensors that its rule saves.
        asked: What to compute.
        decompositions: For operators that the compiler does not accept.

    Raises:
        OutsideError: A use must be contracted outside.
    """
    nodes = [node for of in tensors for node in of]
    values = [node.meta["val"] for node in nodes]
    contracted = Contracted([], [], 0)

    def contract(*flat: Tensor) -> list[Tensor]:
        nonlocal contracted
        rest = iter(flat)
        contracted = _contract(inside, [[next(rest) for _ in of] for of in tensors], asked)
        return contracted.results

    functional = torch.func.functionalize(contract)  # the compiler accepts no changes in place
    with values[0].fake_mode:
        contract(*values)  # plans contractions, which would otherwise be traced, too
        traced = make_fx(functional, decomposition_table=dict(decompositions))(*values)
    traced.graph.eliminate_dead_code()
    # Tensors may have other strides than traced: compilers may choose them, and kernels do where
    # PyTorch's kernels without data do not.
    if any(_reads_strides(node) for node in traced.graph.nodes):
        raise OutsideError(inside[-1].number)
    copies: dict[fx.Node, fx.Node] = {}
    given = iter(nodes)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op != "output":
            copies[node] = copy = graph.node_copy(node, lambda x: copies[x])
            if copy.target is torch.ops.aten.view.default:
                copy.target = torch.ops.aten.reshape.default
    results: Any = traced.graph.output_node().args[0]
    return contracted._replace(results=[copies[x] for x in results])


def _reads_strides(node: fx.Node) -> bool:
    """Whether an operator reads elements by their places in memory."""
    return getattr(node.target, "overloadpacket", None) is torch.ops.aten.as_strided


def _room_beside(taken: int, kernels: Kernels) -> Room:
    """The room that a device has left beside rows that are already kept."""
    return lambda device, elements: taken + elements <= kernels.room(device)


def _contract(
    inside: Sequence[Inside], tensors: Sequence[Sequence[Tensor]], asked: Asked
) -> Contracted:
    """The Gramian of all that some uses read, and the kept blocks."""
    found = _columns(inside, tensors, Limit(asked.limit))
    taken, kept = 0, list[KeptBlock]()
    factors: list[Tensor] = []
    bundles = Bundles()
    ready: list[list[Columns]] = []
    for number, use, _ in inside:
        read: list[Columns] = []
        for i, tracked in enumerate(use.reads):
            columns = found.pop(id(tracked.sources[0]), None)
            if columns is None:
                continue
            read.append(columns)
            if asked.form is not None:
                taken += columns.keep(asked.form, _room_beside(taken, columns.kernels))
                for whole, of in columns.found():
                    region = whole.shifted(-columns.parameter.offset)
                    kept.append(KeptBlock(number, i, region, of.equation, len(of.operands)))
                    factors += of.operands
        ready += bundles.add(*read)
    parts = [gram_of_bundle(x) for x in (*ready, *bundles.rest())]
    total = [part for part in parts if part is not None]
    gramian = torch.stack(total).sum(0) if len(total) > 1 else total[0]
    return Contracted([gramian, *factors], kept, taken)


def _columns(
    inside: Sequence[Inside], tensors: Sequence[Sequence[Tensor]], limit: Limit
) -> dict[int, Columns]:
    """The columns of all parameters that some uses read, by the `id` of the parameter."""
    devices = Devices(limit, is_traced=True)
    found: dict[int, Columns] = {}
    regions: dict[int, Region] = {}
    for (number, use, layout), (cotangent, *saved) in zip(inside, tensors, strict=True):
        try:
            blocks = use.contributions(layout, cotangent.unsqueeze(0), tuple(saved), limit)
        except RuntimeError as error:  # a formula reads values
            raise OutsideError(number) from error
        for tracked, region, block in blocks:
            parameter = tracked.sources[0]
            whole = regions.setdefault(id(parameter), region.canonical)
            if whole != region.canonical or prod(whole.shape) != parameter.numel():
                raise OutsideError(number)  # parts of a parameter are joined by strides
            columns = found.get(id(parameter))
            if columns is None:
                kernels = devices.on(parameter.device)
                columns = found[id(parameter)] = Columns(Region.of_parameter(parameter), kernels)
            columns.add(region, block)
    return found
