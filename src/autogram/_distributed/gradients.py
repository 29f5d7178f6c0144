"""Gradients: sums each rank's Jᵀ w over the ranks into ``.grad``, for any wrapper of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import as_real, in_numbers_of
from autogram._capture.autograd.grad import (
    add_to_grad,
    at_least_single,
    check_addable,
    dtype_of_grad,
    has_hooks,
)
from autogram._distributed.group import Group
from autogram._distributed.ranks import Ranks
from autogram._distributed.wrapper import Wrappers
from autogram._jacobian import Jacobian

_BUCKET = 2**22  # elements of gradients that one call sums


def accumulate(
    ranks: Ranks,
    own: dict[str, Tensor],
    names: Mapping[Tensor, str],
    wrappers: Wrappers,
    outside: Mapping[Tensor, Tensor],
) -> Callable[[], None]:
    """Adds the ranks' sum of Jᵀ w to ``.grad``, except where this calls code of the user.

    Args:
        ranks: The ranks; the sum is that of their last step.
        own: This rank's Jᵀ w by name; its tensors are released.
        names: The parameters of the engine.
        wrappers: The wrappers that run the forward passes.
        outside: Gradients of other parameters, which wrappers wait for together with these.

    Returns:
        A function for the rest: it calls hooks on parameters, and hands wrappers the gradients they
        wait for. It may fail on some ranks, because the ranks exchange nothing after it.
    """
    hooked: list[tuple[Tensor, Tensor]] = []
    parameters = {name: p for p, name in names.items()}
    reached = ranks.reached
    split = {name: p for name in reached if (p := ranks.shards[name]) is not None}
    for name, parameter in split.items():
        gradient = _scattered(parameter, _gradient(own, name, parameters))
        _add(parameter, gradient, hooked)
    by_us = [n for n in reached if n not in split and not wrappers.has(parameters[n])]
    summands = (_gradient(own, name, parameters) for name in by_us)
    for name, total in zip(by_us, _sums(ranks.group, summands), strict=True):
        _add(parameters[name], total.to(dtype_of_grad(parameters[name])), hooked)
    wrapped = {
        parameter: _gradient(own, name, parameters)
        for name, parameter in parameters.items()
        if wrappers.waits_for(
            parameter, is_reached=name in own, is_reached_elsewhere=name in reached
        )
    }

    def finish() -> None:
        try:
            add_to_grad(hooked)
        finally:  # other ranks wait for it
            wrappers.hand_over({**outside, **wrapped})

    return finish


def _add(parameter: Tensor, gradient: Tensor, hooked: list[tuple[Tensor, Tensor]]) -> None:
    """Adds to a parameter's gradient, or notes the addition if the parameter has hooks."""
    if has_hooks(parameter):
        hooked.append((parameter, gradient))
    else:
        add_to_grad([(parameter, gradient)])


def _scattered(parameter: Any, gradient: Tensor) -> Tensor:
    """This rank's shard of a whole parameter's gradient, summed over the ranks."""
    from torch.distributed.tensor import DTensor, Partial

    mesh, placements = parameter.device_mesh, parameter.placements
    partial = DTensor.from_local(gradient, mesh, [Partial()] * mesh.ndim, run_check=False)
    shard: Tensor = partial.redistribute(placements=placements)
    return shard.to(device=parameter.device, dtype=dtype_of_grad(parameter))


def gradients_of(jacobian: Jacobian, weights: Tensor) -> dict[str, Tensor]:
    """This rank's Jᵀ w, for the parameters that its losses reach."""
    parameters = {p: jacobian._names[p] for part in jacobian._parts.each for p in part.columns}
    check_addable(parameters, parameters)
    reached = set(parameters.values())
    gradients = jacobian.vjp(weights) if reached else {}
    return {name: gradient for name, gradient in gradients.items() if name in reached}


def _gradient(found: dict[str, Tensor], name: str, parameters: Mapping[str, Tensor]) -> Tensor:
    """The gradient of one parameter, in at least float32: zero where the losses miss it."""
    parameter = parameters[name]
    dtype = at_least_single(parameter.dtype)
    gradient = found.pop(name, None)
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype)
    return gradient.to(dtype)


def _sums(group: Group, tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    """Sums tensors over the ranks, some at a time. All ranks have them in the same order."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(x.numel() for x in bucket) >= _BUCKET:
            yield from _summed(group, bucket)
            bucket = []
    if bucket:
        yield from _summed(group, bucket)


def _summed(group: Group, bucket: list[Tensor]) -> Iterator[Tensor]:
    """Sums some tensors with one call."""
    real = [as_real(x) for x in bucket]
    flat = torch.cat([x.reshape(-1) for x in real])
    group.add_up(flat).wait()
    parts = flat.split([x.numel() for x in real])
    for of, x, found in zip(bucket, real, parts, strict=True):
        yield in_numbers_of(of, torch.empty_like(x).copy_(found.view(x.shape)))
