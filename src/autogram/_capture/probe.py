"""The probe: finds where the samples lie, by backward passes for some of the samples alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from autogram._blocks import Layout, candidates
from autogram._capture.objectives import Objectives
from autogram._capture.recording import Channel, Recording
from autogram._capture.use import Use
from autogram._capture.visit import visit
from autogram._errors import MixedSamplesError, NonFiniteError

Layouts = dict[int, tuple[Layout, ...]]


class Probe:
    """The candidates that are left for each use, after the passes so far.

    Where the cotangent of the losses is zero for all but some chosen samples, that of a use must
    be exactly zero outside of their places: zeros survive every differentiable operation, so this
    needs no tolerance. A layout that says otherwise is wrong; if none is left, samples are mixed.

    A *thorough* probe passes once for each binary digit of the samples' numbers, and once for its
    complement. Any two samples differ in a digit, so no mixture and no permutation can hide. A
    quick one takes half of the samples at random: enough where the same calls were probed before
    on tensors of another shape.
    """

    def __init__(self, channel: Channel, objectives: Objectives) -> None:
        self._channel = channel
        self._objectives = objectives
        self._left: dict[Use, list[Layout]] = {}
        self._chosen = torch.zeros(0, dtype=torch.bool)

    def run(self, wanted: Use | None, *, thorough: bool, generator: random.Random) -> None:
        """Passes until every use is settled.

        Args:
            wanted: A use known to have a cotangent, if there is one.
            thorough: Whether nothing is known of these calls yet.
            generator: Chooses the samples of a quick probe.

        Raises:
            MixedSamplesError: No layout fits a use.
            NonFiniteError: A cotangent is infinite or not a number.
        """
        b = self._objectives.samples
        subsets = _digits(b) if thorough else _halves(b, generator)
        for count, chosen in enumerate(subsets):
            is_clear = all(len(left) == 1 for left in self._left.values())
            if count and not thorough and is_clear and (not wanted or wanted in self._left):
                return
            self._chosen = chosen
            cotangent = self._objectives.only(chosen)
            visit(self._channel, self._objectives.losses, cotangent, lambda: self._observe)
        if wanted and wanted not in self._left:
            raise MixedSamplesError(
                f"{describe(wanted)} has a cotangent for all samples together and none for parts "
                "of them, so the losses are not per-sample. Pass `batch_dim=None` to `Engine`."
            )

    def found(self) -> dict[Recording, Layouts]:
        """The layouts that are left, by recording and index of the use.

        Where a thorough probe leaves several, they agree on all places that have a cotangent now.
        """
        layouts: dict[Recording, Layouts] = {}
        for use, left in self._left.items():
            layouts.setdefault(use.recording, {})[use.index] = tuple(left)
        return layouts

    def _observe(self, use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        """Rules out the layouts of a use that the cotangent contradicts."""
        del saved
        if not torch.isfinite(cotangent).all():
            raise NonFiniteError(
                f"The cotangent of {describe(use)} is infinite or not a number, so that it cannot "
                "be seen where the samples lie. Look for a division by zero or an overflow behind "
                "this call; `torch.autograd.detect_anomaly()` finds it."
            )
        places = (cotangent[0] != 0).cpu()
        if not places.any():
            return
        left = self._left.get(use)
        if left is None:
            left = candidates(use.shape, use.dims, self._objectives.samples)
        left = [layout for layout in left if self._fits(layout, places)]
        if not left:
            raise MixedSamplesError(
                f"The samples are mixed before the result of {describe(use)} reaches the losses: "
                f"in this tensor of shape {use.shape}, they have no places of their own. Batch "
                "normalisation in training mode does this, and so do losses that compare or "
                "reorder samples, tokens that are routed to experts, and parameters that are used "
                "without a batch. Call `.eval()` on "
                "the normalisation, replace it by `nn.GroupNorm`, or pass `batch_dim=None` to "
                "`Engine` (exact for any losses, slower)."
            )
        self._left[use] = left

    def _fits(self, layout: Layout, places: Tensor) -> bool:
        """Whether all places with a cotangent are those of chosen samples."""
        along = places.movedim(layout.dim, 0).reshape(places.shape[layout.dim], -1).any(1)
        by_sample = along.view(layout.before, layout.batch, layout.after).any(2).any(0)
        return not bool((by_sample & ~self._chosen).any())


def describe(use: Use) -> str:
    """A use by its function and the parameters that it reads."""
    names = dict.fromkeys(use.recording.names[p] for t in use.reads for p in t.sources)
    return f"`{use.function}` with " + ", ".join(f"`{name}`" for name in names)


def _digits(b: int) -> Iterator[Tensor]:
    """For each binary digit of the numbers below ``b``: those that have it, and the others."""
    numbers = torch.arange(b)
    for digit in range((b - 1).bit_length()):
        has_digit = (numbers >> digit) % 2 == 1
        yield has_digit
        yield ~has_digit


def _halves(b: int, generator: random.Random) -> Iterator[Tensor]:
    """Half of the numbers below ``b`` and the other half, twice."""
    for _ in range(2):
        chosen = torch.zeros(b, dtype=torch.bool)
        chosen[generator.sample(range(b), b // 2)] = True
        yield chosen
        yield ~chosen
