"""Tracked tensors: trainable parameters, and what is computed from them alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._blocks import Region


@dataclass(eq=False)
class Tracked:
    """A parameter, or a batch-free tensor that was derived from parameters.

    A view or a cast of one parameter is addressed as a region of it. Any other derived tensor has
    blocks of its own, which are pulled back along its edge to the parameters.
    """

    sources: tuple[Tensor, ...]
    """The parameters that it is computed from."""
    region: Region | None
    """Which elements of its only source it holds, or ``None`` if it must be pulled back."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    version: int
    """The version of the tensor that ``region`` is true for."""
    edge: GradientEdge | None = field(default=None, repr=False)
    """Where its autograd graph starts. Set once it is used and has no region."""


def track_parameter(parameter: Tensor) -> Tracked:
    """A parameter as the whole of itself."""
    region = Region.of_parameter(parameter)
    return Tracked((parameter,), region, region.shape, parameter.dtype, parameter._version)


def track_derived(
    derived: Tensor, origins: list[Tracked], base: Tracked | None, is_cast: bool
) -> Tracked:
    """A tensor computed from tracked tensors.

    Args:
        derived: The tensor.
        origins: The tracked tensors that it was computed from.
        base: What is known of the tensor that it is a view of, if it is one.
        is_cast: Whether it has the elements of its origin, in another dtype or on another device.
    """
    sources = tuple({id(p): p for origin in origins for p in origin.sources}.values())
    region = None
    if is_cast and len(origins) == 1:
        region = origins[0].region
    elif base is not None and base.region is not None and derived._base is not None:
        region = _region_of_view(derived, derived._base, base.region)
    if derived.is_complex():
        region = None  # counted in complex numbers, where the parameter has real ones
    if region is not None and (region.shape != tuple(derived.shape) or not region.is_injective):
        region = None
    return _track(derived, sources, region)


def track_unseen(tensor: Tensor, sources: tuple[Tensor, ...]) -> Tracked:
    """A tensor that was computed from parameters by calls that were not recorded."""
    return _track(tensor, sources, None)


def settle(tensor: Tensor, tracked: Tracked) -> Tracked:
    """What ``tensor`` is at the moment of its use.

    In-place operations may have changed a derived tensor since it was seen. Its edge in the
    autograd graph is always that of its present value, and exact; its region may not be.
    """
    if tracked.region is not None:
        if tensor.is_leaf or tensor._version == tracked.version:
            return tracked
        tracked = _track(tensor, tracked.sources, None)
    edge = get_gradient_edge(tensor)
    if tracked.edge is None:
        tracked.edge = edge
    elif tracked.edge != edge:
        tracked = _track(tensor, tracked.sources, None)
        tracked.edge = edge
    return tracked


def _track(tensor: Tensor, sources: tuple[Tensor, ...], region: Region | None) -> Tracked:
    """The record of a tensor as it is now."""
    return Tracked(sources, region, tuple(tensor.shape), tensor.dtype, tensor._version)


def _region_of_view(view: Tensor, base: Tensor, region: Region) -> Region | None:
    """The elements of the parameter behind a view, if its base lies in memory as they do."""
    if tuple(base.stride()) != region.strides or tuple(base.shape) != region.shape:
        return None
    return Region.of(view, region.offset - int(base.storage_offset()))
