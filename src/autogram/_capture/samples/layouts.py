"""Layouts that fit the owners of places."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._blocks import (
    Folded,
    Hidden,
    Partial,
    Placement,
    Routed,
    Scattered,
    Subset,
    candidates,
)
from autogram._capture.places.places import Places
from autogram._capture.samples.owners import HIDDEN, NONE, Owners
from autogram._capture.uses import Use, describe, not_finite
from autogram._errors import MixedSamplesError


def fitting_layouts(use: Use, owners: Owners, is_finite: Tensor) -> tuple[Placement, ...]:
    """The layouts that fit the owners of a use's places, where some samples may be hidden.

    Several layouts may fit; these agree on all places that have a cotangent now. Where nothing has
    a cotangent, the result is empty.
    """
    if not owners:
        raise mixed_samples(use)
    batch = len(is_finite)
    if any(bool((places == HIDDEN).any()) for places in owners.values()):
        (bad,) = (~is_finite).nonzero(as_tuple=True)
        if len(bad) > 1:
            regular = regular_layouts(use.shape, owners, is_finite)
            is_told = len(regular) == 1 and _has_all(regular[0], owners, bad)
            return regular if is_told else (_hidden(use, owners, bad, batch),)
        owners = {dim: torch.where(x == HIDDEN, bad, x) for dim, x in owners.items()}
    places = next(iter(owners.values()))
    # A count takes a fraction of the time of `unique`.
    (there,) = places[places >= 0].bincount(minlength=batch).nonzero(as_tuple=True)
    if not len(there):
        return ()
    if (together := -min(owners)) > 0:
        rest = len(use.shape[together:])
        samples = places.view((*use.shape[:together], *(1,) * rest))
        dims = tuple([dim for dim in use.dims if dim < together])
        owners = _along_dims(samples, dims) or (
            owners if 0 in dims and together <= use.depth else {}
        )
        if not owners and len(there) > 1:
            return (Scattered(batch, samples, dims),)
    regular = regular_layouts(use.shape, owners, is_finite)
    if len(there) > 1 and 2 * len(there) > batch:
        return regular or (_routed(use, owners, batch),)
    # A call for few samples may also fit a layout of all samples, with most places empty.
    few = _of_few(use, owners, there, batch)
    return (*regular, *few) if len(there) > 1 else (*few, *regular)


def regular_layouts(
    shape: tuple[int, ...], owners: Owners, is_finite: Tensor
) -> tuple[Folded, ...]:
    """The regular layouts that fit the owners of a tensor's places, the likely ones first."""
    found = []
    for layout in candidates(shape, tuple(d for d in owners if d >= 0), len(is_finite)):
        places = owners[layout.dim]
        given = layout.owners(places.new_empty((1,) * layout.dim + places.shape)).view(-1)
        fits = torch.where(places == HIDDEN, ~is_finite[given], (places < 0) | (places == given))
        if bool(fits.all()):
            found.append(layout)
    return tuple(found)


def layouts_of_owners(use: Use, owners: Tensor, samples: int) -> tuple[Placement, ...]:
    """The layout of a use, by the owners of its places along the first dimension, on the CPU.

    The owners are as in :mod:`.moves`. There is no layout where no place is of any sample.
    """
    if not owners.dim():
        sample = int(owners)
        return () if sample < 0 else (Partial(Subset((sample,), samples), None),)
    is_finite = torch.ones(samples, dtype=torch.bool, device="cpu")
    return fitting_layouts(use, {0: owners}, is_finite)[:1]


def mixed_samples(use: Use, cause: str = "") -> MixedSamplesError:
    """The error for a use whose samples have no places of their own, with a sentence on why."""
    return MixedSamplesError(
        f"The samples are mixed before the result of {describe(use)} reaches the losses: in this "
        f"tensor of shape {use.shape}, they have no places of their own. {cause}Batch "
        "normalisation in training mode does this, and so do losses that compare samples, and "
        "parameters that are used without a batch. Call `.eval()` on the normalisation, replace it "
        "by `nn.GroupNorm`, or pass `batch_dim=None` to `Engine` (exact for any losses, slower)."
    )


def layouts_of_places(use: Use, places: Places | None, samples: int) -> tuple[Placement, ...]:
    """The layout of a use with these places; there is none where no cotangent arrives."""
    if places is None or places.is_empty:
        return ()
    shape, grid = use.shape, places.compact(is_exact=False).grid()
    along = [dim for dim, size in enumerate(grid.shape) if size != 1]
    dims = along or use.dims[:1]
    if len(dims) == 1 and dims[0] in use.dims:
        owners = {dims[0]: grid.flatten().expand(shape[dims[0]])}
    else:
        together = max([dim + 1 for dim in along], default=1)
        front = grid.reshape(grid.shape[:together])
        owners = {-together: front.expand(shape[:together]).flatten()}
    is_finite = torch.ones(samples, dtype=torch.bool, device="cpu")
    return fitting_layouts(use, owners, is_finite)[:1]


def regular_layout_of_places(places: Places, samples: int) -> Folded | None:
    """A regular layout of a tensor with these places, if there is one."""
    grid = places.compact(is_exact=False).grid()
    dims = [dim for dim, size in enumerate(grid.shape) if size != 1] or [0]
    if len(dims) > 1 or not grid.dim():
        return None
    (dim,), shape = dims, places.shape
    owners = {dim: grid.flatten().expand(shape[dim])}
    is_finite = torch.ones(samples, dtype=torch.bool, device="cpu")
    return next(iter(regular_layouts(shape, owners, is_finite)), None)


def _along_dims(elements: Tensor, dims: tuple[int, ...]) -> dict[int, Tensor]:
    """The owners along each dimension along which the owners of elements, or positions, agree."""
    found = {}
    for dim in dims:
        by_place = elements.movedim(dim, 0).reshape(elements.shape[dim], -1)
        places = by_place.amax(1)
        if bool(((by_place == places.unsqueeze(1)) | (by_place == NONE)).all()):
            found[dim] = places
    return found


def _has_all(layout: Folded, owners: Owners, bad: Tensor) -> bool:
    """Whether some samples all have a cotangent in a layout, so that it tells hidden places apart.

    Else a hidden place of one sample may be where the layout has another one.
    """
    there = layout.owners(owners[layout.dim])[owners[layout.dim] != NONE]
    return bool(torch.isin(bad, there).all())


def _hidden(use: Use, owners: Owners, bad: Tensor, batch: int) -> Hidden:
    """The layout where nothing tells which of some samples hidden places are of."""
    (dim, places), *_ = owners.items()
    if dim < 0 and (0 not in use.dims or -dim > use.depth):
        raise not_finite(use)
    rest = _routed(use, {dim: places.masked_fill(places == HIDDEN, NONE)}, batch)
    behind = len(use.shape) - rest.dim - rest.depth
    is_hidden = (places == HIDDEN).view(*rest.samples.shape, *(1,) * behind)
    return Hidden(tuple(bad.tolist()), is_hidden, rest)


def _routed(use: Use, owners: Owners, batch: int) -> Routed:
    """The layout of samples in irregular places along a dimension, or several together."""
    dim, places = next(iter(owners.items()))
    return Routed(max(dim, 0), batch, places if dim >= 0 else places.view(use.shape[:-dim]))


def _of_few(use: Use, owners: Owners, there: Tensor, batch: int) -> tuple[Partial, ...]:
    """The layouts of a use that is for some samples."""
    count = len(there)
    subset = Subset(tuple(there.tolist()), batch)
    ranks = {dim: torch.searchsorted(there, x.contiguous()) for dim, x in owners.items()}
    own = {dim: torch.where(owners[dim] < 0, NONE, of_dim) for dim, of_dim in ranks.items()}
    if count == 1:
        return (Partial(subset, _routed(use, own, 1) if own else None),)
    regular = regular_layouts(use.shape, own, torch.ones(count, dtype=torch.bool, device="cpu"))
    return tuple(Partial(subset, x) for x in regular or (_routed(use, own, count),))
