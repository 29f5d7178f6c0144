"""The layout of a use, from the places of its samples."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._blocks import (
    Folded,
    Partial,
    Placement,
    Routed,
    Scattered,
    Subset,
    candidates,
)
from autogram._capture.places.places import EMPTY, Places, Shape
from autogram._capture.uses import Use, describe
from autogram.errors import MixedSamplesError

# For each dimension along which samples have places of their own, the sample of each place, or
# `EMPTY`. Under -n, the samples of all positions along the first n dimensions together, in
# row-major order.
_Samples = dict[int, Tensor]


def layout_of_places(use: Use, places: Places | None, batch: int) -> Placement | None:
    """The layout of a use with these places of a batch; ``None`` where no cotangent arrives."""
    if places is None or places.is_empty:
        return None
    shape, grid = use.shape, places.compact(is_exact=False).grid()
    along = [dim for dim, size in enumerate(grid.shape) if size != 1]
    dims = along or use.dims[:1]
    if len(dims) == 1 and dims[0] in use.dims:
        return _fitting(use, {dims[0]: grid.flatten().expand(shape[dims[0]])}, batch)
    together = max([dim + 1 for dim in along], default=1)
    samples = grid.reshape(grid.shape[:together]).expand(shape[:together])
    return _fitting(use, {-together: samples.flatten()}, batch)


def regular_layout_of_places(places: Places, batch: int) -> Folded | None:
    """A regular layout of a tensor with these places, if there is one."""
    grid = places.compact(is_exact=False).grid()
    dims = [dim for dim, size in enumerate(grid.shape) if size != 1] or [0]
    if len(dims) > 1 or not grid.dim():
        return None
    (dim,), shape = dims, places.shape
    return _regular(shape, {dim: grid.flatten().expand(shape[dim])}, batch)


def mixed_samples(use: Use, cause: str = "") -> MixedSamplesError:
    """The error for a use whose samples have no places of their own, with a sentence on why."""
    return MixedSamplesError(
        f"The samples are mixed between the result of {describe(use)} and the losses: this "
        f"tensor of shape {use.shape} has no separate places for them. {cause}Batch "
        "normalisation in training mode does this, and so do losses that compare samples, and "
        "parameters that are used without a batch. Call `.eval()` on the normalisation, replace it "
        "by `nn.GroupNorm`, or pass `batch_dim=None` to `Engine` (exact for any losses, slower)."
    )


def _fitting(use: Use, samples: _Samples, batch: int) -> Placement | None:
    """The layout that fits the samples of a use's places."""
    places = next(iter(samples.values()))
    # A count takes a fraction of the time of `unique`.
    (there,) = places[places >= 0].bincount(minlength=batch).nonzero(as_tuple=True)
    if not len(there):
        return None
    if (together := -min(samples)) > 0:
        rest = len(use.shape[together:])
        elements = places.view((*use.shape[:together], *(1,) * rest))
        dims = tuple([dim for dim in use.dims if dim < together])
        may_stay = 0 in dims and together <= use.depth
        samples = _along_dims(elements, dims) or (samples if may_stay else {})
        if not samples and len(there) > 1:
            return Scattered(batch, elements, dims)
    if len(there) == 1:
        return _of_few(use, samples, there, batch)
    if regular := _regular(use.shape, samples, batch):
        return regular
    if 2 * len(there) > batch:
        return _routed(use, samples, batch)
    return _of_few(use, samples, there, batch)


def _regular(shape: Shape, samples: _Samples, batch: int) -> Folded | None:
    """The likeliest regular layout that fits the samples of a tensor's places, if one does."""
    for layout in candidates(shape, tuple(dim for dim in samples if dim >= 0), batch):
        places = samples[layout.dim]
        expected = layout.owners(places.new_empty((1,) * layout.dim + places.shape)).view(-1)
        if bool(((places == EMPTY) | (places == expected)).all()):
            return layout
    return None


def _along_dims(elements: Tensor, dims: tuple[int, ...]) -> _Samples:
    """The samples along each dimension along which those of elements, or positions, agree."""
    along = {}
    for dim in dims:
        by_place = elements.movedim(dim, 0).reshape(elements.shape[dim], -1)
        places = by_place.amax(1)
        if bool(((by_place == places.unsqueeze(1)) | (by_place == EMPTY)).all()):
            along[dim] = places
    return along


def _routed(use: Use, samples: _Samples, batch: int) -> Routed:
    """The layout of samples in irregular places along a dimension, or several together."""
    dim, places = next(iter(samples.items()))
    return Routed(max(dim, 0), batch, places if dim >= 0 else places.view(use.shape[:-dim]))


def _of_few(use: Use, samples: _Samples, there: Tensor, batch: int) -> Partial:
    """The layout of a use that is for some samples."""
    count = len(there)
    subset = Subset(tuple(there.tolist()), batch)
    ranks = {dim: torch.searchsorted(there, x.contiguous()) for dim, x in samples.items()}
    ranked = {dim: x.masked_fill(samples[dim] < 0, EMPTY) for dim, x in ranks.items()}
    if count == 1:
        return Partial(subset, _routed(use, ranked, 1) if ranked else None)
    return Partial(subset, _regular(use.shape, ranked, count) or _routed(use, ranked, count))
