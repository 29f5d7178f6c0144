"""The probe: finds where the samples lie, by a backward pass for one sample alone."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram._blocks import Layout, candidates
from autogram._capture.objectives import Objectives
from autogram._capture.recording import Channel, Recording
from autogram._capture.use import Use
from autogram._capture.visit import visit
from autogram._errors import MixedSamplesError, NonFiniteError

# After that many probes that do not tell two layouts apart, they agree wherever there is a
# cotangent at all, and the first of them is as good as any.
_MOST_PROBES_TO_TELL_APART = 4


class Probe:
    """The candidates that are left for each use, after the samples probed so far.

    A cotangent that is zero for all samples but one must be exactly zero outside of that sample's
    place: zeros survive every differentiable operation, so this needs no tolerance. What is not
    zero there belongs to another place, or the samples are mixed.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._left: dict[Use, list[Layout]] = {}
        self._sample = 0

    def run(self, channel: Channel, objectives: Objectives, wanted: Use) -> None:
        """Probes samples until every use is settled.

        Args:
            channel: The channel of the taps.
            objectives: What to differentiate.
            wanted: A use known to have a cotangent, so that a sample must be found that shows it.

        Raises:
            MixedSamplesError: No layout fits a use.
            NonFiniteError: A cotangent is infinite or not a number.
        """
        b = self._batch
        # The middle first: places 0 and b - 1 are likelier to be those of a single token, too.
        order = dict.fromkeys([b // 2, 0, b - 1, *range(b)])
        for count, sample in enumerate(order):
            unclear = any(len(left) > 1 for left in self._left.values())
            if wanted in self._left and not (unclear and count < _MOST_PROBES_TO_TELL_APART):
                return
            self._sample = sample
            visit(channel, objectives.losses, objectives.one_hot(sample), lambda: self._observe)
        if wanted not in self._left:
            raise MixedSamplesError(
                f"{describe(wanted)} has a cotangent for all samples together and none for each "
                "alone, so the losses are not per-sample. Pass `batch_dim=None` to `Engine`."
            )

    def found(self) -> dict[Recording, dict[int, Layout]]:
        """The layouts, by recording and index of the use."""
        layouts: dict[Recording, dict[int, Layout]] = {}
        for use, left in self._left.items():
            layouts.setdefault(use.recording, {})[use.index] = left[0]
        return layouts

    def _observe(self, use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        """Rules out the layouts of a use that the cotangent of one sample contradicts."""
        del saved
        if not torch.isfinite(cotangent).all():
            raise NonFiniteError(
                f"The cotangent of {describe(use)} is infinite or not a number, so that it cannot "
                "be seen where the samples lie. Look for a division by zero or an overflow behind "
                "this call; `torch.autograd.detect_anomaly()` finds it."
            )
        places = cotangent[0] != 0
        if not places.any():
            return
        left = self._left.get(use)
        if left is None:
            left = candidates(use.shape, use.dims, self._batch)
        left = [layout for layout in left if self._fits(layout, places)]
        if not left:
            raise MixedSamplesError(
                f"The samples are mixed before the result of {describe(use)} reaches the losses: "
                f"the cotangent of sample {self._sample} has no place of its own in a tensor of "
                f"shape {use.shape}. Batch normalisation in training mode does this, and so do "
                "losses that compare samples, or a parameter used without a batch. Call `.eval()` "
                "on the normalisation, replace it by `nn.GroupNorm`, or pass `batch_dim=None` to "
                "`Engine` (exact for any losses, slower)."
            )
        self._left[use] = left

    def _fits(self, layout: Layout, places: Tensor) -> bool:
        """Whether all places with a cotangent are those of the probed sample."""
        along = places.movedim(layout.dim, 0).flatten(1).any(1)
        by_sample = along.view(layout.before, layout.batch, layout.after).any(2).any(0)
        by_sample[self._sample] = False
        return not bool(by_sample.any())


def describe(use: Use) -> str:
    """A use by its function and the parameters that it reads."""
    names = dict.fromkeys(use.recording.names[p] for t in use.reads for p in t.sources)
    return f"`{use.function}` with " + ", ".join(f"`{name}`" for name in names)
