"""Gradients: Jᵀ w of each rank, summed over the ranks into ``.grad``, whatever wraps the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autogram._capture import add_to_grad
from autogram._distributed.group import Group
from autogram._errors import UnsupportedError
from autogram._jacobian import Jacobian

_BUCKET = 2**22  # elements of gradients that are summed by one call


def accumulate(
    group: Group,
    jacobian: Jacobian,
    weights: Tensor,
    reached: Sequence[str],
    wrappers: Mapping[Any, bool],
) -> None:
    """Adds the sum over ranks of their Jᵀ w to ``.grad``.

    Args:
        group: The ranks.
        jacobian: That of this rank.
        weights: Those of this rank's objectives.
        reached: The parameters that any rank's losses reach, in the same order on all ranks.
        wrappers: What runs the forward passes, and whether it exchanges gradients.
    """
    parameters = {name: p for p, name in jacobian._names.items()}
    wrapped = {id(p): of for of in wrappers for p in of.parameters()}
    by_wrapper: list[str] = []
    by_us: list[str] = []
    for name in reached:
        (by_wrapper if id(parameters[name]) in wrapped else by_us).append(name)
    found = _gradients(jacobian, weights)
    own = (_gradient(found, name, parameters) for name in by_us)
    for name, total in zip(by_us, _sums(group, own), strict=True):
        add_to_grad(parameters[name], total.to(parameters[name].dtype))
    if by_wrapper:
        # The wrapper divides what it adds up by the number of ranks, sooner or later.
        pairs = [
            (parameters[name], _gradient(found, name, parameters) * group.size)
            for name in by_wrapper
            if _is_expected(wrapped[id(parameters[name])], name, found)
        ]
        _hand_over(pairs, wrappers)


def _is_expected(wrapper: Any, name: str, found: Mapping[str, Tensor]) -> bool:
    """Whether a wrapper waits for the gradient of a parameter of this rank.

    One that has looked for unused parameters does not wait for these.
    """
    return name in found or not wrapper.find_unused_parameters


def _hand_over(pairs: Sequence[tuple[Tensor, Tensor]], wrappers: Mapping[Any, bool]) -> None:
    """Gives gradients to wrappers, by a pass that reaches nothing but parameters: hooks run."""
    tensors = [parameter for parameter, _ in pairs]
    gradients = [gradient.to(parameter.dtype) for parameter, gradient in pairs]
    del wrappers
    torch.autograd.backward(tensors, gradients)


def _gradients(jacobian: Jacobian, weights: Tensor) -> dict[str, Tensor]:
    """Jᵀ w of this rank, of the parameters that its losses reach."""
    reached = {p for part in jacobian._parts.each for p in part.columns}
    names = {name for p, name in jacobian._names.items() if p in reached}
    found = jacobian.vjp(weights) if names else {}
    return {name: gradient for name, gradient in found.items() if name in names}


def _gradient(found: dict[str, Tensor], name: str, parameters: Mapping[str, Tensor]) -> Tensor:
    """The gradient of one parameter, in at least float32: zero where the losses miss it."""
    parameter = parameters[name]
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    gradient = found.pop(name, None)
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype)
    return gradient.to(dtype)


def _sums(group: Group, tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    """Sums over the ranks of tensors that these have in one order, some of them at a time."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(x.numel() for x in bucket) >= _BUCKET:
            yield from _summed(group, bucket)
            bucket = []
    if bucket:
        yield from _summed(group, bucket)


def _summed(group: Group, bucket: list[Tensor]) -> Iterator[Tensor]:
    """The sums of some tensors, by one call."""
    flat = torch.cat([x.reshape(-1) for x in bucket])
    group.add_up(flat).wait()
    for x, found in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
        yield torch.empty_like(x).copy_(found.view(x.shape))


def check_outside(outside: Sequence[Tensor]) -> None:
    """Refuses parameters that are none of the engine's, whose gradients nobody would sum."""
    if found := [tuple(x.shape) for x in outside if isinstance(x, torch.nn.Parameter)]:
        raise UnsupportedError(
            f"The losses depend on parameters of the shapes {found[:4]} that are not the engine's, "
            "so that nobody would add up their gradients over the ranks. Give their modules to "
            "`Engine` as well; or make two passes: "
            "`losses.backward(engine.weights(losses, weighting))`."
        )
