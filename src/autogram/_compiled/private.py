"""Private names of PyTorch that the backend uses, and what PyTorch would have to offer instead.

Nothing else in this package names what PyTorch keeps to itself. When the backend is first used, all
of them are looked for. Where one is missing, parts are compiled without taps.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import NamedTuple


class Private(NamedTuple):
    """A name of PyTorch.

    Attributes:
        module: Where it is.
        name: The name there, of which a part may follow a dot.
        instead: What would make it unnecessary, with the public request if there is one.
    """

    module: str
    name: str
    instead: str


_ISSUES = "https://github.com/pytorch/pytorch/issues/"
_JOINT = f"a backend that is given the joint graph, {_ISSUES}91356"
_DONATED = f"a choice of what may be overwritten, for each graph, {_ISSUES}129496"
_NODE = "the node that runs, for a compiled backward pass; no request is known"

NAMES = (
    Private("torch._C", "_current_autograd_node", _NODE),
    Private("torch._C", "_current_graph_task_id", _NODE),
    Private("torch._C", "DisableTorchFunction", "the same under a public name; none is known"),
    Private("torch._guards", "TracingContext.try_get", _JOINT),
    Private("torch._guards", "tracing", _JOINT),
    Private("torch._dynamo.backends.common", "aot_autograd", _JOINT),
    Private("torch._functorch.config", "patch", _DONATED),
    Private("torch._functorch.config", "donated_buffer", _DONATED),
    Private("torch._functorch.config", "enable_autograd_cache", _JOINT),
    Private("torch._functorch._aot_autograd.utils", "make_boxed_func", _JOINT),
    Private("torch._functorch.partitioners", "min_cut_rematerialization_partition", _JOINT),
    Private("torch._inductor.compile_fx", "compile_fx", _JOINT),
    Private("torch._inductor.compile_fx", "compile_fx_inner", _JOINT),
    Private("torch._inductor.decomposition", "select_decomp_table", _JOINT),
    Private("torch._inductor.config", "patch", _JOINT),
    Private("torch._inductor.config", "get_config_copy", _JOINT),
    Private("torch._inductor.virtualized", "V.set_fake_mode", _JOINT),
    Private(
        "torch", "_TorchCompileInductorWrapper", "a check of inductor's options; none is known"
    ),
)


@cache
def missing() -> tuple[str, ...]:
    """The names that this version of PyTorch does not have."""
    return tuple(f"{x.module}.{x.name}" for x in NAMES if not _is_there(x))


def _is_there(private: Private) -> bool:
    """Whether PyTorch has a name."""
    try:
        found: object = import_module(private.module)
        for part in private.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True
