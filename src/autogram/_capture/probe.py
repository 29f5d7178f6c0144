"""The probe: finds where the samples lie in the result of each use."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._blocks import Layout, Routed, candidates
from autogram._capture.objectives import Objectives
from autogram._capture.owners import HIDDEN, not_finite, owners_by_scales, owners_by_zeros
from autogram._capture.proof import Proof, Spot, Spots
from autogram._capture.recording import Channel
from autogram._capture.use import Use, describe
from autogram._errors import MixedSamplesError

Layouts = dict[Use, tuple[Layout, ...]]


def find_layouts(
    channel: Channel, objectives: Objectives, wanted: Use | None, spots: Spots | None
) -> tuple[Layouts, Proof | None]:
    """The layouts of all uses that the losses depend on, and what they depend on.

    Where several are left, they agree on all places that have a cotangent now.

    Args:
        channel: The channel of the taps.
        objectives: The losses with their samples.
        wanted: A use known to have a cotangent, if there is one.
        spots: What may move samples, or ``None`` where the same calls were looked at before, on
            other values or shapes. Then two passes are enough, and there is no proof.

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
    fitting: dict[Spot, set[int]] = {}
    for seen, by_dim in owners.items():
        if isinstance(seen, Spot):
            regular = _regular_layouts(seen.shape, by_dim, is_finite)
            fitting[seen] = {layout.dim for layout in regular}
        else:
            layouts[seen] = fitting_layouts(seen, by_dim, is_finite)
    return layouts, None if spots is None else spots.proof(fitting)


def fitting_layouts(use: Use, owners: dict[int, Tensor], is_finite: Tensor) -> tuple[Layout, ...]:
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
    regular = _regular_layouts(use.shape, owners, is_finite)
    # Hidden places are those of some sample, which only a single regular layout can tell.
    if len(regular) != 1 and any(bool((places == HIDDEN).any()) for places in owners.values()):
        raise not_finite(use)
    if regular:
        return regular
    dim = next(iter(owners))
    return (Routed(dim, len(is_finite), owners[dim]),)


def _regular_layouts(
    shape: tuple[int, ...], owners: dict[int, Tensor], is_finite: Tensor
) -> tuple[Layout, ...]:
    """The regular layouts of a tensor that fit the owners of its places."""
    return tuple(
        layout
        for layout in candidates(shape, tuple(owners), len(is_finite))
        if _fits(layout, owners[layout.dim], is_finite)
    )


def _fits(layout: Layout, owners: Tensor, is_finite: Tensor) -> bool:
    """Whether a layout gives every place to its owner, and hidden ones to samples that hide."""
    given = layout.owners(owners.new_empty((1,) * layout.dim + owners.shape)).view(-1)
    fits = torch.where(owners == HIDDEN, ~is_finite[given], (owners < 0) | (owners == given))
    return bool(fits.all())
