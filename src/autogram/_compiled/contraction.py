"""The Gramian inside of a compiled backward pass: contractions as a part of its graph.

Once it is certain where the samples lie, nothing about the contractions of a part depends on
values. They are traced on tensors without data, and put behind the cotangents of the graph. What
remains is one result ``(k, b, k, b)``, and factors that die inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autogram._blocks import Block, Bundles, Columns, Folded, Kernels, Limit, Region, gram_of_bundle
from autogram._blocks.kernels.contraction import find_path
from autogram._blocks.kernels.workspace import Memory
from autogram._capture.uses import RuleUse


class Inside(NamedTuple):
    """A use that is contracted in the graph.

    Attributes:
        number: Its number in the part.
        use: A use of some call, for its recipes and regions.
        layout: Where the samples lie.
    """

    number: int
    use: RuleUse
    layout: Folded

    @property
    def key(self) -> object:
        """What the contraction depends on."""
        operands = tuple(tuple(x is not None for x in of.operands) for of in self.use.recipes)
        return self.number, self.layout, operands


class UntraceableError(Exception):
    """A use cannot be contracted on tensors without data.

    Attributes:
        number: Its number in the part.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def append_gramian(
    graph: fx.Graph,
    inside: Sequence[Inside],
    tensors: Sequence[Sequence[fx.Node]],
    limit: Limit,
    decompositions: Mapping[Any, Any],
) -> fx.Node:
    """Puts the Gramian of some uses behind a graph.

    Args:
        graph: The graph, which is changed.
        inside: The uses.
        tensors: For each, its cotangent, and what its rule saves.
        limit: How large one intermediate result may be.
        decompositions: Of the operators that the compiler does not take.

    Returns:
        The node of the Gramian, ``(k, b, k, b)``.

    Raises:
        UntraceableError: A use cannot be contracted so.
    """
    nodes = [node for of in tensors for node in of]
    values = [node.meta["val"] for node in nodes]

    def contract(*flat: Tensor) -> Tensor:
        rest = iter(flat)
        return _gramian(inside, [[next(rest) for _ in of] for of in tensors], limit)

    contract(*values)  # finds contractions, which would be traced, too
    traced = make_fx(contract, decomposition_table=dict(decompositions))(*values)
    traced.graph.eliminate_dead_code()
    # The compiler may give tensors other strides than those that were traced.
    if any(_reads_strides(node) for node in traced.graph.nodes):
        raise UntraceableError(inside[-1].number)
    copies: dict[fx.Node, fx.Node] = {}
    given = iter(nodes)
    result: Any = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "output":
            result = copies[node.args[0]]
        else:
            copies[node] = graph.node_copy(node, lambda x: copies[x])
    return result  # type: ignore[no-any-return]  # a node


def _reads_strides(node: fx.Node) -> bool:
    """Whether an operator takes elements by their places in memory."""
    return getattr(node.target, "overloadpacket", None) is torch.ops.aten.as_strided


class _TracedKernels(Kernels):
    """Calls that say nothing of strides, which a compiler may choose otherwise."""

    def einsum(
        self, equation: str, operands: Sequence[Tensor], memory: Memory | None = None
    ) -> Tensor:
        """An einsum in the dtype in which products accumulate, in new memory."""
        del memory
        dtype = self.accumulating(*{x.dtype for x in operands})
        stack = [x.to(dtype) for x in operands]
        for positions, of in find_path(equation, tuple(x.shape for x in operands)).steps:
            taken = [stack.pop(position) for position in positions]
            stack.append(torch.einsum(of, *taken))
        return stack[0]


def _gramian(inside: Sequence[Inside], tensors: Sequence[Sequence[Tensor]], limit: Limit) -> Tensor:
    """The Gramian of all that some uses read."""
    kernels = _TracedKernels(limit)
    found: dict[int, Columns] = {}
    regions: dict[int, Region] = {}
    bundles = Bundles()
    for (number, use, layout), (cotangent, *saved) in zip(inside, tensors, strict=True):
        try:
            blocks = use.contributions(layout, cotangent.unsqueeze(0), tuple(saved), limit)
        except RuntimeError as error:  # a formula that reads values
            raise UntraceableError(number) from error
        for tracked, region, block in blocks:
            if not isinstance(block, Block):
                raise UntraceableError(number)  # which rows of a table were read, values say
            parameter = tracked.sources[0]
            whole = regions.setdefault(id(parameter), region.canonical)
            if whole != region.canonical or prod(whole.shape) != parameter.numel():
                raise UntraceableError(number)  # parts of a parameter are put together by strides
            columns = found.get(id(parameter))
            if columns is None:
                columns = found[id(parameter)] = Columns(Region.of_parameter(parameter), kernels)
            columns.add(region, block)
    ready: list[list[Columns]] = []
    for _, use, _ in inside:
        read = [found.pop(id(p), None) for t in use.reads for p in t.sources]
        ready += bundles.add(*[columns for columns in read if columns is not None])
    parts = [gram_of_bundle(x) for x in (*ready, *bundles.rest())]
    total = [part for part in parts if part is not None]
    return torch.stack(total).sum(0) if len(total) > 1 else total[0]
