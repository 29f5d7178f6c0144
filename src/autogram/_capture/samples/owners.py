"""Owners: which sample each place of a use's output belongs to, seen in backward passes.

The backward pass is linear in the cotangent of the losses, and where samples keep to themselves,
each place depends on the objectives of one sample alone. Two codes show which:

- By zeros: the cotangent of the losses is zero for all but some samples, and that of a use must be
  zero in all other places. Zeros survive every differentiable operation, so this needs no
  tolerance. Any two samples differ in a binary digit of their numbers, so that one pass for each
  digit and one for its complement tell all of them apart, and no mixture can hide.
- By scales: sample s is multiplied by 2^s, which no rounding can blur, so that every place of it is
  2^s times what it was, bit for bit. Two passes tell 32 samples apart. A sum over several samples
  is not a power of two times what it was, but by an accident of its values.

A place is a position along a dimension, whatever the others. Where samples meet in such places, or
can lie along no dimension, each element is a place.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.proof import Prover, Spot, shown
from autogram._capture.uses import Use, describe
from autogram._capture.visit import visit
from autogram._errors import NonFiniteError

NONE = -1
HIDDEN = -2

_ELEMENTS = -1  # in the place of a dimension, where each element is a place

# Exponents from -16 to 15 keep what is of ordinary size far from overflow and underflow. They are
# in no order, because sums such as y[b] + 2 y[b - 2] have powers of two of their own.
_SCALES = 32
_EXPONENTS = torch.tensor(random.Random(0).sample(range(-16, 16), _SCALES), device="cpu")
_DIGITS = _EXPONENTS.argsort()


@dataclass(frozen=True)
class Owners:
    """The sample of each place of one tensor, on the CPU.

    ``NONE`` where the cotangent is zero, ``HIDDEN`` where it is not finite, and belongs to one of
    the samples whose objectives are not finite.

    Attributes:
        by_dim: By each dimension in which samples can lie and do not meet, those along it.
        by_element: Those of all elements, in a row, if these were looked at and have one owner.
    """

    by_dim: dict[int, Tensor]
    by_element: Tensor | None = None

    @staticmethod
    def of(found: dict[int, Tensor]) -> Owners:
        """What was found for each dimension, or for the elements."""
        if _ELEMENTS in found:
            return Owners({}, found[_ELEMENTS])
        return Owners(found)

    @property
    def all(self) -> list[Tensor]:
        """Those along each dimension, and those of the elements."""
        return [*self.by_dim.values(), *([] if self.by_element is None else [self.by_element])]

    @property
    def are_mixed(self) -> bool:
        """Whether several samples meet in some element, as far as it was looked at."""
        return not self.all

    @property
    def are_none(self) -> bool:
        """Whether the whole cotangent is zero."""
        return bool(self.all) and bool((self.all[0] == NONE).all())

    @property
    def has_hidden(self) -> bool:
        """Whether some places are hidden."""
        return any(bool((places == HIDDEN).any()) for places in self.all)

    def map(self, change: Callable[[Tensor], Tensor]) -> Owners:
        """The owners, with the samples changed."""
        elements = None if self.by_element is None else change(self.by_element)
        return Owners({dim: change(places) for dim, places in self.by_dim.items()}, elements)


def owners_by_zeros(
    channel: Channel, objectives: Objectives, prover: Prover
) -> tuple[dict[Use, Owners], dict[Spot, Owners]]:
    """The owners of all uses and spots that are reached, by passes for some of the samples alone.

    A sample whose objectives are not finite hides its own places: zero times infinity is no zero,
    so that they are seen in every pass. The others show the layout, if there are any.

    Args:
        channel: The channel of the taps.
        objectives: The losses with their samples.
        prover: What needs other cotangents in the graph.

    Raises:
        NonFiniteError: A cotangent is infinite or not a number, and every objective is finite or
            none is.
    """
    zeros = _Zeros(channel, objectives)
    zeros.look(prover)
    uses = {use: zeros.owners(use) for use in zeros.counts}
    met = [use for use, owners in uses.items() if owners.are_mixed]
    mixed = [use for use in met if not zeros.may_be_apart(use)]
    if met and not mixed:
        channel.by_element.update([_name(use) for use in met])
        uses, spots = owners_by_zeros(channel, objectives, prover)
        still = [_name(use) for use, owners in uses.items() if owners.are_mixed]
        channel.by_element.difference_update(still)
        return uses, spots
    for use in mixed:
        if zeros.is_hidden(use):
            raise not_finite(use)
    spots = {spot: zeros.owners(spot) for spot in prover.spots if zeros.has_reached(spot)}
    return {**{use: uses[use] for use in mixed}, **uses}, spots  # first what is mixed for certain


class _Zeros:
    """Passes for parts of the samples, and the places that have a cotangent in each of them.

    Attributes:
        counts: For each use that was reached, how many elements had a cotangent, over all passes.
    """

    def __init__(self, channel: Channel, objectives: Objectives) -> None:
        self.counts = Counter[Use]()
        self._channel = channel
        self._objectives = objectives
        self._digits = (objectives.samples - 1).bit_length()
        self._may_hide = not objectives.is_finite.all() and bool(objectives.is_finite.any())
        # Three numbers for each place: the binary digits that the number of some sample of it does
        # not have, those that it has, and whether the place was not finite.
        self._marks: dict[Use | Spot, dict[int, Tensor]] = defaultdict(dict)
        self._part = (0, 0)

    def look(self, prover: Prover) -> None:
        """Runs the passes."""
        samples = torch.arange(self._objectives.samples, device="cpu")
        with shown(prover.survey, prover.spots, self._see):
            for digit in range(self._digits):
                for bit in (0, 1):
                    self._part = bit, 1 << digit
                    chosen = samples >> digit & 1 == bit
                    show_uses(self._channel, self._objectives, chosen, self._see_use)

    def owners(self, seen: Use | Spot) -> Owners:
        """The owners of a use or a spot that was reached."""
        every = (1 << self._digits) - 1
        found = {}
        for dim, (lacked, had, hidden) in self._marks[seen].items():
            is_seen, is_hidden = (had | lacked) != 0, hidden != 0
            is_apart = bool(((had ^ lacked)[is_seen] == every).all())
            if is_apart and not self._objectives.is_finite[had[is_seen & is_hidden]].any():
                found[dim] = torch.where(is_seen, had, torch.where(is_hidden, HIDDEN, NONE))
        return Owners.of(found)

    def may_be_apart(self, use: Use) -> bool:
        """Whether samples that meet along every dimension of a use may do so in no element."""
        return not _is_by_element(use) and self.counts[use] <= self._digits * prod(use.shape)

    def has_reached(self, spot: Spot) -> bool:
        """Whether a spot had a cotangent, be it zero."""
        return spot in self._marks

    def is_hidden(self, use: Use) -> bool:
        """Whether some places of a use were not finite."""
        return any(bool(marks[2].any()) for marks in self._marks[use].values())

    def _see_use(self, use: Use, cotangent: Tensor) -> None:
        """Takes in the cotangent of a use in one of the passes."""
        is_finite = cotangent.isfinite()
        if not is_finite.all():
            if not self._may_hide:
                raise not_finite(use)
            self._mark(use, ~is_finite, 2, 1)
            cotangent = torch.where(is_finite, cotangent, 0)
        self.counts[use] += int((cotangent != 0).sum())
        self._see(use, cotangent)

    def _see(self, seen: Use | Spot, cotangent: Tensor) -> None:
        """Takes in a cotangent in one of the passes."""
        self._mark(seen, cotangent, *self._part)

    def _mark(self, seen: Use | Spot, cotangent: Tensor, row: int, mark: int) -> None:
        """Marks the places where a tensor is not zero."""
        marks = self._marks[seen]
        for dim, by_place in _by_place(seen, cotangent):
            if dim not in marks:
                marks[dim] = torch.zeros(3, len(by_place), dtype=torch.long, device="cpu")
            marks[dim][row] |= mark * (by_place != 0).any(1).cpu()


class Scales:
    """Passes in which the samples differ by powers of two, to be compared with one of equal ones.

    Raises:
        NonFiniteError: A cotangent is infinite or not a number.
    """

    def __init__(self, channel: Channel, objectives: Objectives) -> None:
        self._samples = objectives.samples
        self._scaled: dict[int, dict[Use, dict[int, Tensor]]] = {}
        samples = torch.arange(self._samples, device="cpu")
        unit = 1
        while unit < self._samples:
            exponents = _EXPONENTS[samples // unit % _SCALES]
            self._scaled[unit] = _scaled(channel, objectives, torch.exp2(exponents.float()))
            unit *= _SCALES

    @property
    def uses(self) -> set[Use]:
        """The uses that have a cotangent."""
        return set().union(*self._scaled.values())

    def owners(self, use: Use, cotangent: Tensor) -> Owners:
        """The owners of a use's places.

        A dimension is left out, too, where what was multiplied is not bit for bit what it was: at
        numbers of extreme size, or where an operation adds up in a different order each time.

        Args:
            use: The use.
            cotangent: Its cotangent where all samples have the weight one, ``(*output,)``.
        """
        owners = {}
        for dim, plain in _checksums(use, cotangent).items():
            places: Tensor | None = (plain != 0).long() - 1
            for unit, found in self._scaled.items():
                digits = _digits(plain, found.get(use, {}).get(dim, torch.zeros_like(plain)))
                if places is None or digits is None:
                    places = None
                else:
                    places += torch.where(places >= 0, unit * digits, 0)
            if places is not None and int(places.max()) < self._samples:
                owners[dim] = places
        return Owners.of(owners)


def _scaled(
    channel: Channel, objectives: Objectives, scales: Tensor
) -> dict[Use, dict[int, Tensor]]:
    """The checksums of uses that have a cotangent, in a pass with a scale for each sample."""
    found = {}

    def see(use: Use, cotangent: Tensor) -> None:
        if not cotangent.isfinite().all():
            raise not_finite(use)
        if (cotangent != 0).any():
            found[use] = _checksums(use, cotangent)

    show_uses(channel, objectives, scales, see)
    return found


def show_uses(
    channel: Channel, objectives: Objectives, weights: Tensor, see: Callable[[Use, Tensor], None]
) -> None:
    """Shows the cotangent ``(*output,)`` of each use in a pass with a weight for each sample."""

    def receive(use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        del saved
        if cotangent.numel():
            see(use, cotangent[0])

    visit(channel, objectives.losses, objectives.weighted(weights), lambda: receive)


def _by_place(seen: Use | Spot, cotangent: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A cotangent as ``(places, others)``, by each dimension in which samples can lie."""
    if _is_by_element(seen):
        yield _ELEMENTS, cotangent.reshape(-1, 1)
        return
    for dim in seen.dims:
        yield dim, cotangent.movedim(dim, 0).reshape(cotangent.shape[dim], -1)


def _is_by_element(seen: Use | Spot) -> bool:
    """Whether the places to look at are single elements."""
    if isinstance(seen, Spot) or not seen.dims:
        return not seen.dims
    return _name(seen) in seen.recording.channel.by_element


def _name(use: Use) -> tuple[int, str]:
    """What a use is known again by."""
    return use.index, use.function


def not_finite(use: Use) -> NonFiniteError:
    """The error for a use whose cotangent does not show where the samples lie."""
    return NonFiniteError(
        f"The cotangent of {describe(use)} is infinite or not a number, so that it cannot be seen "
        "where the samples lie. Look for a division by zero or an overflow behind this call; "
        "`torch.autograd.detect_anomaly()` finds it."
    )


def _checksums(use: Use, cotangent: Tensor) -> dict[int, Tensor]:
    """One number for each place that no part of it is missing from, on the CPU, by dimension."""
    found = {}
    for dim, by_place in _by_place(use, cotangent):
        is_complex = by_place.is_complex()
        parts = torch.view_as_real(by_place).flatten(1) if is_complex else by_place
        factors = torch.arange(1, parts.shape[1] + 1, device=parts.device).double().sin()
        found[dim] = (parts.double() * factors).sum(1).cpu()
    return found


def _digits(plain: Tensor, scaled: Tensor) -> Tensor | None:
    """The digits by which places were multiplied, or ``None`` if it was not by a power of two."""
    has_sum = plain != 0
    exponents = torch.where(has_sum, (scaled / plain).abs().log2().round(), 0)
    if not torch.equal(torch.where(has_sum, plain * torch.exp2(exponents), 0), scaled):
        return None
    codes = exponents.long() + _SCALES // 2
    is_code = (codes >= 0) & (codes < _SCALES)
    return _DIGITS[codes] if bool(is_code.all()) else None
