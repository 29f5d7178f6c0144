"""Compilers of a part's graphs: inductor, or AOTAutograd alone, with variants of backward.

A backward pass may run after another one over the same saved tensors, so that neither may overwrite
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from autogram._compiled.tracing.operator import DECOMPOSITIONS
from autogram._undo import undone

# Makes the backward pass of a part from its graph, a compiler for its variants, and a function
# that gives decompositions of operators that the compiler does not accept.
MakeBackward = Callable[[fx.GraphModule, Callable[..., Any], Callable[[], Mapping[Any, Any]]], Any]


def _inductor(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    config: Mapping[str, Any],
    backward: MakeBackward | None,
) -> Callable[..., Any]:
    """Compiles a graph, and its backward pass with ``backward``, if it is given."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if "get_decomp_fn" in kwargs:  # inductor's cache has no entry for a table
            kwargs["get_decomp_fn"] = select_decomp_table
        if not kwargs.get("is_backward"):
            return compile_fx_inner(graph, inputs, **kwargs)
        patches = torch._inductor.config.get_config_copy() if config else {}

        def compile(variant: fx.GraphModule, examples: Sequence[Any] | None = None) -> Any:
            variant.graph.output_node().meta["user_visible_output_idxs"] = []
            with torch._inductor.config.patch(patches):
                return compile_fx_inner(variant, examples or inputs, **kwargs)

        _keep_saved_tensors()
        return compile(graph) if backward is None else backward(graph, compile, select_decomp_table)

    with torch._inductor.config.patch(dict(config)):
        decompositions = {**select_decomp_table(), **DECOMPOSITIONS}
    compiled: Any = compile_fx(
        graph,
        inputs,
        inner_compile=inner,
        config_patches=dict(config),
        decompositions=decompositions,
    )
    return compiled  # type: ignore[no-any-return]  # as typed in torch


def _aot_eager(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    config: Mapping[str, Any],
    backward: MakeBackward | None,
) -> Callable[..., Any]:
    """The same without inductor: the operators that AOTAutograd has traced run one by one."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    del config

    def compile(graph: fx.GraphModule, examples: Sequence[Any] | None = None) -> Any:
        del examples
        return make_boxed_func(graph.forward)

    def compile_backward(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        _keep_saved_tensors()
        return compile(graph) if backward is None else backward(graph, compile, dict)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=compile,
        bw_compiler=compile_backward,
        decompositions=dict(DECOMPOSITIONS),
        partition_fn=min_cut_rematerialization_partition,
    )(graph, inputs)
    return compiled


COMPILERS = {"inductor": _inductor, "aot_eager": _aot_eager}


@contextmanager
def compiling() -> Iterator[None]:
    """Prevents other threads from compiling during a block, as Dynamo does.

    The state of tracing is shared by all threads. A compiled function called in the meantime
    would take the tracing for one of its own calls, unless it is told that something compiles.
    """
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:
        before = torch.compiler._is_compiling_flag
        with undone(partial(setattr, torch.compiler, "_is_compiling_flag", before)):
            torch.compiler._is_compiling_flag = True
            yield


def _keep_saved_tensors() -> None:
    """Tells AOTAutograd that a backward pass overwrites no saved tensor of the current graph.

    Otherwise inductor reuses their memory, and AOTAutograd refuses `retain_graph`. Both look at one
    list. It is emptied in place, because AOTAutograd may have stored it in several places.
    """
    context = torch._guards.TracingContext.try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if donated:
        donated.clear()
