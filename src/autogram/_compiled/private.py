"""Private names of PyTorch that the backend uses, and what PyTorch would have to offer instead.

This package uses no private names outside these lists. The first use of the backend looks for
all of `PRIVATE_NAMES`. If one is missing, parts are compiled without taps.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

_ISSUES = "https://github.com/pytorch/pytorch/issues/"
_JOINT = f"a backend that is given the joint graph, {_ISSUES}91356"
_SEVERAL = f"several backward passes for one forward pass, {_ISSUES}128234"

# Keys: the feature that would make some names unnecessary, with the public request if there is one.
# Names: a module and a name in it, perhaps with an attribute after a dot, also of instances.
PRIVATE_NAMES = {
    _JOINT: (
        "torch._subclasses.functional_tensor:FunctionalTensor",
        "torch:_functionalize_mutation_counter",
        "torch._functorch._aot_autograd.descriptors:PlainAOTInput",
        "torch._functorch._aot_autograd.utils:make_boxed_func",
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        "torch._dynamo.backends.common:aot_autograd",
        "torch._inductor.compile_fx:compile_fx",
        "torch._inductor.decomposition:select_decomp_table",
    ),
    _SEVERAL: (
        "torch._guards:TracingContext.try_get",
        "torch._guards:TracingContext.fake_mode",
        "torch._guards:tracing",
        "torch._dynamo.convert_frame:compile_lock",
        "torch.compiler:_is_compiling_flag",
        "torch._inductor.compile_fx:compile_fx_inner",
        "torch._inductor.config:patch",
        "torch._inductor.config:get_config_copy",
        "torch._inductor.virtualized:V.set_fake_mode",
    ),
    f"a choice of what may be overwritten, for each graph, {_ISSUES}129496": (
        "torch._guards:TracingContext.fw_metadata",
        "torch._functorch._aot_autograd.schemas:ViewAndMutationMeta.bw_donated_idxs",
    ),
    "the node that runs, for a compiled backward pass; no request is known": (
        "torch._C:_current_autograd_node",
    ),
    "a function that is inlined, and not compiled on its own; no request is known": (
        "torch._C._dynamo.eval_frame:_FrameAction",
        "torch._C._dynamo.eval_frame:_FrameExecStrategy",
        "torch._C._dynamo.eval_frame:set_code_exec_strategy",
    ),
    "a view, made again of another tensor; no request is known": ("torch:Tensor._view_func",),
    "a check of inductor's options; no request is known": ("torch:_TorchCompileInductorWrapper",),
    f"in-place calls that a custom function may make, {_ISSUES}91093": (
        "torch.autograd:_unsafe_preserve_version_counter",
    ),
    f"what an operator takes, {_ISSUES}65997": ("torch._ops:OpOverload._schema",),
    "the same in `torch.compiler`; no request is known": (
        "torch._dynamo:lookup_backend",
        "torch._dynamo:register_backend",
    ),
    f"the same under a public name, {_ISSUES}87990": ("torch._C:DisableTorchFunction",),
    "the same under a public name; no request is known": (
        "torch._C:_are_functorch_transforms_active",
        "torch._C:_FunctionBase._input_metadata",
        "torch:Tensor._version",
        "torch.fx:Graph._codegen",
        "torch._subclasses:FakeTensor",
        "torch._subclasses:FakeTensorMode",
    ),
}

# Marks that Dynamo and AOTAutograd write onto objects and read there. A missing mark is no error.
MARKS = {
    _JOINT: ("torch.fx:Node._dynamo_source", "torch.fx:GraphModule._param_name_to_source"),
    _SEVERAL: ("torch._functorch:_boxed_call",),
    "a public decorator that does not import Dynamo; no request is known": (
        "torch._dynamo:_torchdynamo_disable",
    ),
}


@cache
def missing() -> tuple[str, ...]:
    """The names that this version of PyTorch lacks."""
    names = (name for names in PRIVATE_NAMES.values() for name in names)
    return tuple(name.replace(":", ".") for name in names if not _is_there(name))


def _is_there(name: str) -> bool:
    """Whether PyTorch has a name."""
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    try:
        found: object = import_module(module)
        for owner in owners:
            found = getattr(found, owner)
    except (ImportError, AttributeError):
        return False
    return hasattr(found, last) or last in _written_by_instances(found)


def _written_by_instances(owner: object) -> tuple[str, ...]:
    """The names that a class writes or reads when it creates an instance."""
    code = getattr(getattr(owner, "__init__", None), "__code__", None)
    return () if code is None else code.co_names
