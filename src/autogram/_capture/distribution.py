"""Wrappers that spread a model over processes: which passes are exact, and which are refused.

A pass of an engine is local. DistributedDataParallel exchanges gradients in the hooks of an
ordinary backward pass, which Gramians do not need and weighted gradients would miss. A Jacobian has
no columns for shards of parameters.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autogram._capture.autograd.graph import (
    is_tap_of,
    leaves_behind,
    nodes_behind,
    nodes_leading_to,
    shown_by,
)
from autogram._capture.recording import Channel, Recording
from autogram.errors import UnsupportedError

_TWO_PASSES = (
    "`engine.compute_gramian(losses)`, and then an ordinary backward pass of the losses with the "
    "weights"
)
_SHARDED = "FSDPModule", "FullyShardedDataParallel"


def wrapper_now() -> Any:
    """The DistributedDataParallel whose forward runs now, or ``None``."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def note_wrapper(recording: Recording) -> None:
    """Notes the wrapper that runs a recorded forward pass, and what it has exchanged until now.

    It will exchange nothing inside of its ``no_sync``, nor in a group of one process.
    """
    wrapper = wrapper_now()
    if wrapper is not None and (reference := weakref.ref(wrapper)) not in recording.wrappers:
        will_exchange = wrapper.require_backward_grad_sync and wrapper.process_group.size() > 1
        recording.wrappers[reference] = mark_of(wrapper) if will_exchange else 0


def mark_of(wrapper: Any) -> int:
    """What changes whenever a wrapper takes gradients: not zero.

    Its reducer notes when it has taken the gradient of each parameter, but for the first pass of a
    static graph.
    """
    reducer = getattr(wrapper, "reducer", None)  # there is none if the user delays all gradients
    times = [] if reducer is None else reducer.get_backward_stats()
    return hash((learns(wrapper), *times)) or 1


def learns(wrapper: Any) -> bool:
    """Whether a wrapper learns a static graph from its next pass."""
    return wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued


def _recordings_behind(channel: Channel, losses: Tensor) -> dict[Recording, None]:
    """The recordings of an engine's taps behind some losses, each once."""
    shown = [of.recording for node in nodes_behind(losses) for of in shown_by(node)]
    return {recording: None for recording in shown if recording.channel is channel}


def wrappers_of(channel: Channel, losses: Tensor) -> dict[Any, set[int]]:
    """The wrappers that ran the forward passes behind some losses, with the marks of these."""
    wrappers: dict[Any, set[int]] = {}
    for recording in _recordings_behind(channel, losses):
        for reference, mark in recording.wrappers.items():
            if (wrapper := reference()) is not None:
                wrappers.setdefault(wrapper, set()).add(mark)
    return wrappers


def is_exchanged(channel: Channel, losses: Tensor) -> bool:
    """Whether DistributedDataParallel exchanges gradients in an ordinary pass of some losses.

    Where parameters are read and no use is recorded, as in a model that another backend has
    compiled, this cannot be known, and the result is true.
    """
    if channel.before_pass is not None:
        return True
    if not is_distributed() or torch.distributed.get_world_size() == 1:
        return False
    recordings = _recordings_behind(channel, losses)
    return not recordings or any(any(of.wrappers.values()) for of in recordings)


def refuse_gradients(call: str) -> None:
    """Refuses a call that writes gradients of this process, where gradients are exchanged."""
    raise UnsupportedError(
        f"`{call}` writes gradients of this process alone, and `DistributedDataParallel` or "
        "`fully_shard` exchanges those of ordinary backward passes: the processes would have "
        "different parameters after the step. Make the engine with `distributed=True`, and call "
        f"`engine.backward`; or make two passes: {_TWO_PASSES}, on the losses of each process. "
        "Inside `no_sync()`, where nothing is exchanged, this call is exact."
    )


def refuse_shards(modules: Iterable[nn.Module], *, with_others: bool) -> None:
    """Refuses modules whose parameters are spread over processes or devices.

    They may be sharded by `fully_shard` if the engine works ``with_others`` of other processes.
    """
    modules = list(modules)
    for module in modules:
        for name, inner in module.named_modules():
            subject = f"`{name}`" if name else f"The {type(inner).__name__}"
            if isinstance(inner, DataParallel) and len(inner.device_ids) > 1:
                raise UnsupportedError(
                    f"{subject} is wrapped in `DataParallel` on {len(inner.device_ids)} devices, "
                    "which runs copies of the module in threads. Give it one device, or use "
                    f"`DistributedDataParallel` with two passes: {_TWO_PASSES}."
                )
            if _is_of(inner.__class__, *_SHARDED) and not (with_others and is_unit(inner)):
                raise _refusal(f"{subject} is fully sharded")
        allowed = {
            id(parameter)
            for unit in (filter(is_unit, module.modules()) if with_others else ())
            for parameter in unit.parameters()
        }
        for name, parameter in module.named_parameters():
            if _is_shard(parameter) and id(parameter) not in allowed:
                raise _refusal(f"`{name}` is sharded")
    inside = {id(inner) for module in modules for inner in module.modules()}
    # The modules that `fully_shard` was called with, which PyTorch has a list of.
    states = sys.modules.get("torch.distributed._composable_state")
    for outer in list(getattr(states, "_module_state_mapping", ())):
        if id(outer) in inside and with_others:
            continue
        is_around = any(id(inner) in inside for inner in outer.modules())
        if is_around and _is_of(outer.__class__, *_SHARDED):
            raise _refusal(f"A {type(outer).__name__} around the engine's modules is sharded")


def refuse_pass(channel: Channel, modules: Iterable[nn.Module], losses: Tensor) -> None:
    """Refuses losses where a pass of an engine would be taken for the ordinary backward pass."""
    with_others = channel.before_pass is not None
    refuse_shards(modules, with_others=with_others)
    nodes = list(nodes_behind(losses))
    taps = [node for node in nodes if is_tap_of(channel, node)]
    on_the_way = nodes_leading_to(taps, nodes)  # which an engine's pass runs
    if (with_others or not on_the_way) and any(_is_shard(leaf) for leaf in leaves_behind(losses)):
        raise _refusal("The losses are computed from parameters that are sharded")
    for node in on_the_way:
        _refuse_exchange(node)
        if node.name() == "RegisterPostBackwardFunctionBackward" and not with_others:
            raise _refusal("The losses are computed through a part that is fully sharded")
        wrapper = getattr(node, "ddp_weakref", None)
        wrapper = wrapper() if callable(wrapper) else None
        if wrapper is not None and learns(wrapper):
            raise UnsupportedError(
                "The losses are computed by a `DistributedDataParallel` with `static_graph=True`, "
                "which learns from its first backward pass when to exchange gradients, and would "
                "learn it from the engine's pass. Pass `static_graph=False`."
            )


def _refuse_exchange(node: Any) -> None:
    """Refuses a node that exchanges tensors with other processes in its backward pass."""
    function = getattr(type(node), "_forward_cls", None)
    name, module = getattr(function, "__name__", ""), getattr(function, "__module__", "")
    is_collective = module.startswith("torch.distributed.nn.")
    if is_collective or (module == "torch.nn.modules._functions" and name == "SyncBatchNorm"):
        raise UnsupportedError(
            f"The losses are computed through `{name}`, which makes the objectives of one process "
            "depend on the samples of others: their gradients are not in this process. Use "
            "`nn.GroupNorm`, or `nn.BatchNorm2d` within each process; call `.eval()` on a "
            "`SyncBatchNorm`; or gather tensors without their gradients."
        )


def is_distributed() -> bool:
    """Whether this process is one of a group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _refusal(found: str) -> UnsupportedError:
    """The error for sharded parameters, with what to do instead."""
    return UnsupportedError(
        f"{found} (`FullyShardedDataParallel`, `fully_shard` or tensor parallelism): each process "
        "has only a part of the parameters, or all of them for a moment. Make the engine with "
        "`Engine(model, distributed=True)`, for the outermost module, if you use `fully_shard`. "
        "Otherwise, call the engine with a model that has all parameters in each process, as in "
        f"`DistributedDataParallel`, and make two passes: {_TWO_PASSES}."
    )


def is_unit(module: nn.Module) -> bool:
    """Whether a module was given to `fully_shard`."""
    kind: type = type(module)
    return _is_of(kind, "FSDPModule")


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes."""
    module = sys.modules.get("torch.distributed.tensor")  # else there can be none
    return module is not None and isinstance(tensor, module.DTensor)


@lru_cache(maxsize=1024)
def _is_of(kind: type, *names: str) -> bool:
    """Whether a class is one of `torch.distributed`. Known by name, as PyTorch may lack it."""
    return any(
        of.__name__ in names and of.__module__.startswith("torch.distributed.")
        for of in kind.__mro__
    )


def _is_shard(parameter: Tensor) -> bool:
    """Whether a process has a part of a parameter."""
    return getattr(parameter, "_fsdp_flattened", False) or is_dtensor(parameter)
