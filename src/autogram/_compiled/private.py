"""Private names of PyTorch that the backend uses, and what PyTorch would have to offer instead.

Nothing else in this package names what PyTorch keeps to itself. When the backend is first used, all
of `PRIVATE_NAMES` are looked for. Where one is missing, parts are compiled without taps.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import NamedTuple


class Private(NamedTuple):
    """A name of PyTorch.

    Attributes:
        module: Where it is.
        name: The name there, of which a part may follow a dot: also an attribute of instances.
        instead: What would make it unnecessary, with the public request if there is one.
    """

    module: str
    name: str
    instead: str


_ISSUES = "https://github.com/pytorch/pytorch/issues/"
_JOINT = f"a backend that is given the joint graph, {_ISSUES}91356"
_SEVERAL = f"several backward passes for one forward pass, {_ISSUES}128234"
_DONATED = f"a choice of what may be overwritten, for each graph, {_ISSUES}129496"
_NODE = "the node that runs, for a compiled backward pass; no request is known"
_QUIET = f"the same under a public name, {_ISSUES}87990"
_FRAMES = "a function that is inlined, and not compiled on its own; no request is known"
_BACKENDS = "the same in `torch.compiler`; no request is known"
_PUBLIC = "the same under a public name; no request is known"

PRIVATE_NAMES = (
    Private("torch._C", "_current_autograd_node", _NODE),
    Private("torch._C", "_are_functorch_transforms_active", _PUBLIC),
    Private("torch._C", "_FunctionBase._input_metadata", _PUBLIC),
    Private("torch._C", "DisableTorchFunction", _QUIET),
    Private("torch._C._dynamo.eval_frame", "_FrameAction", _FRAMES),
    Private("torch._C._dynamo.eval_frame", "_FrameExecStrategy", _FRAMES),
    Private("torch._C._dynamo.eval_frame", "set_code_exec_strategy", _FRAMES),
    Private("torch", "Tensor._version", _PUBLIC),
    Private("torch", "Tensor._view_func", "a view, made again of another tensor; no request"),
    Private("torch", "_TorchCompileInductorWrapper", "a check of inductor's options; no request"),
    Private(
        "torch.autograd",
        "_unsafe_preserve_version_counter",
        f"in-place calls that a custom function may make, {_ISSUES}91093",
    ),
    Private("torch._ops", "OpOverload._schema", f"what an operator takes, {_ISSUES}65997"),
    Private("torch.fx", "Graph._codegen", _PUBLIC),
    Private("torch._subclasses", "FakeTensor", _PUBLIC),
    Private("torch._subclasses", "FakeTensorMode", _PUBLIC),
    Private("torch._subclasses.functional_tensor", "FunctionalTensor", _JOINT),
    Private("torch", "_functionalize_mutation_counter", _JOINT),
    Private("torch._guards", "TracingContext.try_get", _SEVERAL),
    Private("torch._guards", "TracingContext.fake_mode", _SEVERAL),
    Private("torch._guards", "TracingContext.fw_metadata", _DONATED),
    Private("torch._guards", "tracing", _SEVERAL),
    Private(
        "torch._functorch._aot_autograd.schemas", "ViewAndMutationMeta.bw_donated_idxs", _DONATED
    ),
    Private("torch._functorch._aot_autograd.utils", "make_boxed_func", _JOINT),
    Private("torch._functorch.partitioners", "min_cut_rematerialization_partition", _JOINT),
    Private("torch._dynamo", "lookup_backend", _BACKENDS),
    Private("torch._dynamo.convert_frame", "compile_lock", _SEVERAL),
    Private("torch.compiler", "_is_compiling_flag", _SEVERAL),
    Private("torch._dynamo", "register_backend", _BACKENDS),
    Private("torch._dynamo.backends.common", "aot_autograd", _JOINT),
    Private("torch._inductor.compile_fx", "compile_fx", _JOINT),
    Private("torch._inductor.compile_fx", "compile_fx_inner", _SEVERAL),
    Private("torch._inductor.decomposition", "select_decomp_table", _JOINT),
    Private("torch._inductor.config", "patch", _SEVERAL),
    Private("torch._inductor.config", "get_config_copy", _SEVERAL),
    Private("torch._inductor.virtualized", "V.set_fake_mode", _SEVERAL),
)

# What Dynamo and AOTAutograd write onto objects and read there. Nothing fails where there is none.
MARKS = (
    Private("torch.fx", "Node._dynamo_source", _JOINT),
    Private("torch.fx", "GraphModule._param_name_to_source", _JOINT),
    Private("torch._functorch", "_boxed_call", _SEVERAL),
    Private(
        "torch._dynamo",
        "_torchdynamo_disable",
        "a public decorator that does not import Dynamo; no request is known",
    ),
)


@cache
def missing() -> tuple[str, ...]:
    """The names that this version of PyTorch does not have."""
    return tuple(f"{x.module}.{x.name}" for x in PRIVATE_NAMES if not _is_there(x))


def _is_there(private: Private) -> bool:
    """Whether PyTorch has a name."""
    try:
        found: object = import_module(private.module)
        *path, last = private.name.split(".")
        for part in path:
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return hasattr(found, last) or last in _written_by_instances(found)


def _written_by_instances(owner: object) -> tuple[str, ...]:
    """The names that a class writes or reads where it makes an instance."""
    code = getattr(getattr(owner, "__init__", None), "__code__", None)
    return () if code is None else code.co_names
