"""Statuses of tensors: tracked (computed from trainable parameters alone), batched, or constant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._blocks import Region, as_real


@dataclass(eq=False, slots=True)
class Tracked:
    """The status of a parameter, or of a batch-free tensor that was derived from parameters.

    A complex tensor counts as a real one with a last dimension of two. A view or a cast of one
    parameter is addressed as a region of it. Any other derived tensor has blocks of its own, which
    are pulled back along its edge to the parameters, as factors or rows.
    """

    sources: tuple[Tensor, ...]
    """The parameters that the tensor is computed from."""
    region: Region | None
    """The elements of the only source that the tensor has, or ``None`` where blocks of the tensor
    must be pulled back."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    version: int
    """The version of the tensor for which ``region`` holds."""
    edge: GradientEdge | None = field(default=None, repr=False)
    """Where the autograd graph of the tensor starts. Set at its first use, if it has no region."""
    place: Region | None = None
    """All elements of the source, where they were when the region was found."""
    is_recorded: bool = False
    """Whether each call between the parameters and the tensor was seen, and no hook was set: what
    the calls have saved then tells all that a backward pass does."""

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        sources: tuple[Tensor, ...],
        region: Region | None = None,
        place: Region | None = None,
    ) -> Tracked:
        """A tensor as it is now. Without a region, its blocks are pulled back."""
        shape = real_shape(tensor) if region is None else region.shape
        version = version_of(tensor)
        return cls(sources, region, shape, tensor.dtype, tensor.device, version, place=place)


class Batched(Enum):
    """The status of a tensor that depends on the inputs of the modules."""

    BATCHED = auto()
    UNTAPPED = auto()
    """Parameters may have met the samples where no call shows it, and no tap is on the result."""


BATCHED: Final = Batched.BATCHED
UNTAPPED: Final = Batched.UNTAPPED
Status = Tracked | Batched | None  # the last for a constant


def track_parameter(parameter: Tensor) -> Tracked:
    """The status of a parameter: all elements of itself."""
    region = Region.of_parameter(parameter)
    return Tracked.of(parameter, (parameter,), region, region)


def track_derived(
    derived: Tensor, origins: Sequence[Tracked], base: Status, *, is_cast: bool
) -> Tracked:
    """A tensor computed from tracked tensors, its origins, and perhaps a view of a ``base``.

    A cast has the elements of its origin, in another dtype. On another device, it has blocks there.
    """
    sources = tuple({id(p): p for origin in origins for p in origin.sources}.values())
    region = place = None
    if is_cast and len(origins) == 1:
        region, place = origins[0].region, origins[0].place
    elif any(origin.place is None for origin in origins):
        pass  # what it is a view of is no view of a parameter, or has a hook
    elif isinstance(base, Tracked) and base.region is not None and derived._base is not None:
        region, place = _region_of_view(derived, derived._base, base.region), base.place
    if any(derived.device != parameter.device for parameter in sources):
        region = None
    if region is not None and (region.shape != real_shape(derived) or not region.is_injective):
        region = None
    found = Tracked.of(derived, sources, region, place)
    found.is_recorded = all(x.place is not None or x.is_recorded for x in origins)
    return found


def note_hook(tensor: Tensor, derived: Tracked) -> None:
    """Notes that a hook may change the gradient of a tracked tensor, also for calls before.

    Blocks of its region would be those of a parameter, which the hook has not seen. J has the
    gradients of parameters before their own hooks.
    """
    if not tensor.is_leaf:
        derived.region = derived.place = None
        derived.is_recorded = False
        derived.edge = get_gradient_edge(tensor)


def as_of_now(tensor: Tensor, derived: Tracked) -> Tracked:
    """The status of a tracked tensor at the moment of its use.

    The tensor may have been changed in place since its status was noted. Its edge in the graph
    always belongs to the present value; the region may no longer hold.
    """
    if tensor.is_leaf:
        return derived
    if derived.region is not None:
        if version_of(tensor) == derived.version:
            return derived
        derived = Tracked.of(tensor, derived.sources)
    edge = get_gradient_edge(tensor)
    if derived.edge is not None and derived.edge != edge:
        derived = Tracked.of(tensor, derived.sources)
    derived.edge = edge
    return derived


def _region_of_view(view: Tensor, base: Tensor, region: Region) -> Region | None:
    """The elements of the parameter behind a view, if its base has the strides of the region."""
    if view.is_conj() or view.is_neg():
        return None  # other numbers than those of the parameter
    view, base = as_real(view), as_real(base)
    if tuple(base.stride()) != region.strides or tuple(base.shape) != region.shape:
        return None
    return Region.of(view, region.offset - int(base.storage_offset()))


def real_shape(of: Any) -> tuple[int, ...]:
    """The shape of a tensor, or by its metadata, with a last dimension of two if it is complex."""
    return (*of.shape, 2) if of.dtype.is_complex else tuple(of.shape)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place. One from inference mode does not count changes."""
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base
