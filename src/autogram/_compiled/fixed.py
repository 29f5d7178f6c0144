"""Backward graphs with numbers in place of symbolic sizes.

Contractions are planned for numbers. So where sizes may differ from call to call, a graph with
contractions is made for each set of sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

Form = tuple[Any, ...]
"""The shapes and strides of the inputs of a graph, and the numbers among them."""


def form_of(args: Sequence[Any]) -> Form:
    """The form of some inputs."""
    return tuple((x.shape, x.stride()) if isinstance(x, Tensor) else x for x in args)


def fixed(
    module: fx.GraphModule,
    wanted: Collection[fx.Node],
    args: Sequence[Any],
    decompositions: Mapping[Any, Any],
) -> tuple[fx.GraphModule, dict[fx.Node, Any], list[Any]]:
    """A graph for inputs of one form.

    Args:
        module: The graph, whose output is changed.
        wanted: Nodes of it.
        args: The inputs.
        decompositions: Of operators that the compiler does not take.

    Returns:
        The new graph, its nodes by those that were wanted, and examples of its inputs.
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
    results: Any = made.graph.output_node().args[0]
    return made, dict(zip(nodes, results, strict=True)), examples
