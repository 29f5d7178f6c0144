"""The probe: finds where the samples lie in the result of each use."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._blocks import Folded, Partial, Placement, Routed, Scattered, Subset, candidates
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.owners import (
    ELEMENTS,
    HIDDEN,
    WHOLE,
    not_finite,
    owners_by_scales,
    owners_by_zeros,
)
from autogram._capture.samples.proof import Proof, Spot, Spots
from autogram._capture.uses import Use, describe
from autogram._errors import MixedSamplesError

Layouts = dict[Use, tuple[Placement, ...]]


def find_layouts(
    channel: Channel, objectives: Objectives, wanted: Use | None, spots: Spots | None
) -> tuple[Layouts, Proof | None, bool]:
    """The layouts of all uses that the losses depend on, and what they depend on.

    Also whether some of their places had no cotangent, which the layouts are only taken to fit.

    Where several are left, they agree on all places that have a cotangent now.

    Args:
        channel: The channel of the taps.
        objectives: The losses with their samples.
        wanted: A use known to have a cotangent, if there is one.
        spots: What may move samples, or ``None`` where a graph of this structure was looked at
            before. Then two passes are enough, and no proof is made.

    Raises:
        MixedSamplesError: A use has places that belong to several samples.
        NonFiniteError: A cotangent is infinite or not a number.
    """
    is_finite = objectives.is_finite
    owners = None
    if spots is None and bool(is_finite.all()):
        owners = owners_by_scales(channel, objectives)
    if owners is None or not all(owners.values()) or (wanted and wanted not in owners):
        owners = owners_by_zeros(channel, objectives, spots)
    if wanted and wanted not in owners:
        raise MixedSamplesError(
            f"{describe(wanted)} has a cotangent for all samples together and none for parts "
            "of them, so the losses are not per-sample. Pass `batch_dim=None` to `Engine`."
        )
    layouts: Layouts = {}
    hides = False
    fitting: dict[Spot, set[int]] = {}
    for seen, by_dim in owners.items():
        if isinstance(seen, Spot):
            regular = _regular(seen.shape, by_dim, is_finite)
            fitting[seen] = {layout.dim for layout in regular}
        else:
            layouts[seen] = fitting_layouts(seen, by_dim, is_finite)
            hides |= hide_places(layouts[seen], by_dim)
    return layouts, None if spots is None else spots.proof(fitting), hides


def hide_places(layouts: tuple[Placement, ...], owners: dict[int, Tensor]) -> bool:
    """Whether there are places without a cotangent, which a layout is only taken to fit."""
    regular = {layout.dim for layout in layouts if isinstance(layout, Folded)}
    return any(bool((places < 0).any()) for dim, places in owners.items() if dim in regular)


def fitting_layouts(
    use: Use, owners: dict[int, Tensor], is_finite: Tensor
) -> tuple[Placement, ...]:
    """The layouts that fit the owners of a use's places, where some samples may be hidden."""
    if not owners:
        raise MixedSamplesError(
            f"The samples are mixed before the result of {describe(use)} reaches the losses: "
            f"in this tensor of shape {use.shape}, they have no places of their own. Batch "
            "normalisation in training mode does this, and so do losses that compare samples, "
            "and parameters that are used without a batch. Call `.eval()` on the normalisation, "
            "replace it by `nn.GroupNorm`, or pass `batch_dim=None` to `Engine` (exact for any "
            "losses, slower)."
        )
    batch = len(is_finite)
    (bad,) = (~is_finite).nonzero(as_tuple=True)
    if len(bad) == 1:  # what is hidden belongs to this sample
        owners = {dim: torch.where(x == HIDDEN, bad, x) for dim, x in owners.items()}
    elif any(bool((places == HIDDEN).any()) for places in owners.values()):
        # Hidden places are those of some sample, which only a single regular layout can tell.
        regular = _regular(use.shape, owners, is_finite)
        if len(regular) != 1:
            raise not_finite(use)
        return regular
    dim, places = next(iter(owners.items()))
    if dim == ELEMENTS:
        return (Scattered(batch, places),)
    there = places[places >= 0].unique()
    if not len(there):
        return ()  # without a cotangent, nothing is known
    if len(there) == 1:
        return (_of_one(dim, places, int(there), batch),)
    regular = _regular(use.shape, owners, is_finite)
    if 2 * len(there) <= batch:
        # Calls for few samples may look like those for all of them, with most places empty.
        return (*regular, *_of_few(use, owners, there, batch))
    return regular or (Routed(dim, batch, places),)


def _regular(
    shape: tuple[int, ...], owners: dict[int, Tensor], is_finite: Tensor
) -> tuple[Folded, ...]:
    """The regular layouts that fit the owners, the likely ones first."""
    dims = tuple(dim for dim in owners if dim >= 0)
    found = candidates(shape, dims, len(is_finite))
    return tuple(x for x in found if _fits(x, owners[x.dim], is_finite))


def _of_one(dim: int, places: Tensor, sample: int, batch: int) -> Partial:
    """The layout of a use that is for one sample."""
    seen = None if dim == WHOLE else Routed(dim, 1, places.clamp(max=0))
    return Partial(Subset((sample,), batch), seen)


def _of_few(use: Use, owners: dict[int, Tensor], there: Tensor, batch: int) -> tuple[Partial, ...]:
    """The layouts of a use that is for some samples."""
    subset = Subset(tuple(there.tolist()), batch)
    owners = {d: torch.where(x < 0, -1, torch.searchsorted(there, x)) for d, x in owners.items()}
    dim, places = next(iter(owners.items()))
    regular = _regular(use.shape, owners, torch.ones(len(there), dtype=torch.bool, device="cpu"))
    return tuple(Partial(subset, x) for x in regular or (Routed(dim, len(there), places),))


def _fits(layout: Folded, owners: Tensor, is_finite: Tensor) -> bool:
    """Whether a layout gives every place to its owner, and hidden ones to samples that hide."""
    given = layout.owners(owners.new_empty((1,) * layout.dim + owners.shape)).view(-1)
    fits = torch.where(owners == HIDDEN, ~is_finite[given], (owners < 0) | (owners == given))
    return bool(fits.all())
