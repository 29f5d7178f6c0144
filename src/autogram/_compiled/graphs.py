"""Graphs of backward passes: their parts, and copies with other results."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autogram._compiled.tracing.operator import SHOW

Form = tuple[Any, ...]
"""Shapes and strides of a graph's inputs, and the numbers among them."""

# Views that read each element once.
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.permute.default)


def shows_in(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that show cotangents, in the order of the pass."""
    return [node for node in module.graph.nodes if node.target is SHOW]


def results(module: fx.GraphModule) -> list[Any]:
    """The results of a graph."""
    found: Any = module.graph.output_node().args[0]
    return list(found)


def arguments_of_gradients(module: fx.GraphModule) -> list[int | None]:
    """For each result, the position of the argument that it is the gradient of.

    If one of the arguments that share memory is changed in place, these become a single input,
    before all others. Its gradient has no position.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    described = [getattr(x, "grad_of", None) for x in module.graph.output_node().meta["desc"]]
    return [x.idx if isinstance(x, PlainAOTInput) else None for x in described]


def dtypes(module: fx.GraphModule) -> set[torch.dtype]:
    """The dtypes of all floating-point numbers in a graph: they limit the results' precision."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    return {dtype for dtype in dtypes if dtype.is_floating_point}


def origin(node: fx.Node) -> fx.Node:
    """The node of which another is an alias."""
    while node.target in (SHOW, torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        node = arguments(node)[0]
    return node


def written_once(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Replaces a node by one that all its readers read, and returns that one.

    A view of an elementwise result is written by a product by one, which the compiler fuses with
    the result. Otherwise inductor writes a result with several readers in its own order, and
    copies it for readers that need the order of the view, such as convolutions.
    """
    base = node
    while base.target in _VIEWS:
        base = arguments(base)[0]
        if len(base.users) > 1:
            return node
    if base is node or torch.Tag.pointwise not in getattr(base.target, "tags", ()):
        return node
    with graph.inserting_after(node):
        written = graph.call_function(torch.ops.aten.mul.Tensor, (node, 1))
    written.meta = dict(node.meta)
    node.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)
    return written


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node."""
    return node.args


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that may be changed."""
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    output = graph.output(graph.graph_copy(module.graph, values))
    output.meta = copy.copy(module.graph.output_node().meta)
    graph._codegen = copy.copy(module.graph._codegen)
    copied = fx.GraphModule(module, graph)
    copied.meta = dict(module.meta)
    return copied


def finished(module: fx.GraphModule, results: Sequence[Any]) -> fx.GraphModule:
    """A graph with other results, and without unneeded nodes."""
    output = module.graph.output_node()
    output.args = (tuple(results),)
    output.meta.pop("desc", None)
    for node in reversed(shows_in(module)):
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    _compute_less(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def form_of(args: Sequence[Any]) -> Form:
    """The form of some inputs."""
    return tuple((x.shape, x.stride()) if isinstance(x, Tensor) else x for x in args)


def fixed(
    module: fx.GraphModule,
    wanted: Collection[fx.Node],
    args: Sequence[Any],
    decompositions: Mapping[Any, Any],
) -> tuple[fx.GraphModule, dict[fx.Node, Any], list[Any]]:
    """A graph with numbers instead of symbolic sizes, because contractions are planned for numbers.

    It computes the wanted nodes of a graph, whose output it changes, from inputs of one form.

    Returns:
        The new graph, its nodes by the wanted ones, and examples of its inputs.
    """
    nodes = list(dict.fromkeys(wanted))
    module.graph.output_node().args = (tuple(nodes),)
    module.graph.eliminate_dead_code()
    module.recompile()
    with FakeTensorMode():
        examples = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if isinstance(x, Tensor)
            else x
            for x in args
        ]
        run = fx.Interpreter(module).run
        made = make_fx(run, decomposition_table=dict(decompositions))(*examples)
    return made, dict(zip(nodes, results(made), strict=True)), examples


def _compute_less(graph: fx.Graph) -> None:
    """Makes operators with several gradients (convolutions) compute only the used ones."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        names = [argument.name for argument in schema.arguments]
        if "output_mask" in names and len(node.args) > names.index("output_mask"):
            place = names.index("output_mask")
            used = {user.args[1] for user in node.users if user.target is operator.getitem}
            mask = [bool(x) and i in used for i, x in enumerate(node.args[place])]
            node.update_arg(place, mask)
